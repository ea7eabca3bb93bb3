"""Reads what XLA says of what it compiled: from its text to plain values, and nothing else.

Three texts: the optimised HLO module of one device, the thunk sequence that it becomes, and the log of ptxas.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
#: Results that are a name for what is there already, or are written in place by construction.
_IN_PLACE = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "opt-barrier"}
_UPDATES = {"scatter", "dynamic-update-slice"}
#: "  ROOT %name = type opcode(operands), attributes". A type may be a tuple and hold spaces and comments.
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>\S+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z][a-z0-9-]*)\((?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")


@dataclass(frozen=True, slots=True)
class Kernel:
    """What ptxas says of one entry function."""

    name: str
    registers: int
    #: Bytes.
    spill_stores: int
    spill_loads: int

    @property
    def spills(self) -> bool:
        return self.spill_stores + self.spill_loads > 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel of a thunk sequence; `shared_memory` in bytes."""

    name: str
    grid: tuple[int, ...]
    threads: int
    shared_memory: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of HLO: `types` are the arrays of its result as "bf16[8,128]"."""

    computation: str
    name: str
    types: tuple[str, ...]
    opcode: str
    text: str
    root: bool


def kernels(log: str) -> list[Kernel]:
    """Every entry function in a log of `ptxas -v`, in its order. ValueError where an entry has no numbers."""
    found = []
    for part in log.split("Compiling entry function '")[1:]:
        name = part[: part.index("'")]
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        if spills is None or registers is None:
            raise ValueError(f"ptxas says nothing of the registers or spills of {name}")
        found.append(Kernel(name, int(registers[1]), int(spills[1]), int(spills[2])))
    return found


def launches(thunks: str) -> list[Launch]:
    """Every kernel of a thunk sequence, those in loops and branches too."""
    pattern = r"(\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+) bytes"
    return [
        Launch(name, _numbers(grid), math.prod(_numbers(threads)), int(shared))
        for name, grid, threads, shared in re.findall(pattern, thunks)
    ]


def instructions(hlo: str) -> Iterator[Instruction]:
    """Every instruction of a module's text."""
    computation = ""
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
        elif match := _INSTRUCTION.match(line):
            types = tuple(f"{dtype}[{sizes}]" for dtype, sizes in _ARRAY.findall(match["type"]))
            root = line.lstrip().startswith("ROOT ")
            yield Instruction(computation, match["name"], types, match["opcode"], match["rest"], root)


def collectives(hlo: str) -> Counter[str]:
    """How many of each collective, those in loops counted once; an asynchronous one is its start."""
    found: Counter[str] = Counter()
    for instruction in instructions(hlo):
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in _COLLECTIVES:
            found[opcode] += 1
    return found


def copies(hlo: str, array: str) -> list[str]:
    """Names of instructions whose result is another array of that type ("bf16[700001,128]") than what they are given.

    A scatter or update, and a kernel that is told to write over its operand, writes in place: where XLA cannot let it,
    it puts a copy before it, and that is found.
    """
    everything = list(instructions(hlo))
    roots = {i.computation: i for i in everything if i.root}
    by_name = {(i.computation, i.name): i for i in everything}
    fused = {name for i in everything if i.opcode == "fusion" for name in re.findall(r"calls=%([\w.-]+)", i.text)}
    found = []
    for instruction in everything:
        if array not in instruction.types or instruction.computation in fused or instruction.opcode in _IN_PLACE:
            continue
        opcodes = {instruction.opcode}
        if instruction.opcode == "fusion":
            called = re.search(r"calls=%([\w.-]+)", instruction.text)
            opcodes = set(_made_by(roots[called[1]], array, by_name)) if called else opcodes
        if instruction.opcode == "custom-call" and "output_to_operand_aliasing=" in instruction.text:
            continue
        if not opcodes <= _UPDATES:
            found.append(f"{instruction.name} ({', '.join(sorted(opcodes))})")
    return found


def _made_by(root: Instruction, array: str, by_name: dict[tuple[str, str], Instruction]) -> Iterator[str]:
    """Opcodes that make a fused computation's results of that type."""
    if array not in root.types:
        # The same bytes under another shape.
        yield "bitcast"
    elif root.opcode in ("tuple", "bitcast"):
        for name in re.findall(r"%([\w.-]+)", root.text.split(")")[0]):
            operand = by_name[root.computation, name]
            if root.opcode == "bitcast" or array in operand.types:
                yield from _made_by(operand, operand.types[0] if root.opcode == "bitcast" else array, by_name)
    else:
        yield root.opcode


def donated(hlo: str) -> int:
    """How many outputs of a module take an argument's place."""
    header = hlo[: hlo.index("\n")]
    return len(re.findall(r"\{\d*\}: \(\d+, \{\}, (?:may|must)-alias\)", header))


def size(array: str) -> int:
    """Bytes of "bf16[8,128]"."""
    match = _ARRAY.fullmatch(array)
    if match is None:
        raise ValueError(f"{array!r} is no array type")
    return _BYTES[match[1]] * math.prod(_numbers(match[2]))


def largest(hlo: str, count: int) -> list[str]:
    """The largest arrays that the entry computation makes, each type once: where temporaries go."""
    entry = re.search(r"^ENTRY %(\S+) ", hlo, re.MULTILINE)
    name = entry[1] if entry else ""
    made = {t for i in instructions(hlo) if i.computation == name and i.opcode not in _IN_PLACE for t in i.types}
    return sorted(made, key=size, reverse=True)[:count]


def _numbers(text: str | Iterable[str]) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)) if isinstance(text, str) else tuple(map(int, text))
