"""Worked vectors for other implementations: `python -m spec.make_vectors` writes `vectors/*.json` anew.

Every file is a list of cases; what each key holds is said in README.md. Histories are written as in the sequence API:
["append", [tokens]], ["drop", [logical indices]], ["reposition"].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from spec.model import Layer, Model, ModelConfig, MoE, random_params
from spec.operations import Append, Drop, History, Operation, Reposition, canonical
from spec.request import TokenRange, history_of
from spec.rope import Rotary, RotaryScaling, encode, inverse_frequencies, magnitude, rotate
from spec.sharing import common_prefix
from spec.state import run
from spec.visibility import closure, usage

FOLDER = Path(__file__).parent / "vectors"

#: Histories with what each shows. A token's id is what it would be in the alphabet: 1 is A.
HISTORIES: dict[str, list] = {
    "plain": [["append", [1, 2, 3, 4]]],
    "late route: A B C, drop A": [["append", [1, 2, 3]], ["drop", [0]]],
    "between: A B, drop A, C": [["append", [1, 2]], ["drop", [0]], ["append", [3]]],
    "never: B C": [["append", [2, 3]]],
    "position trace": [
        ["append", [1, 2, 3]],
        ["drop", [1]],
        ["reposition"],
        ["append", [4]],
        ["drop", [3]],
        ["append", [5]],
        ["reposition"],
        ["append", [6]],
    ],
    "reposition before the append": [["append", [1, 2, 3]], ["drop", [1]], ["reposition"], ["append", [4]]],
    "reposition after the append": [["append", [1, 2, 3]], ["drop", [1]], ["append", [4]], ["reposition"]],
    "uniform shift": [["append", [1, 2, 3, 4]], ["drop", [0, 1]], ["reposition"], ["append", [5, 6]]],
    "dropped tail: n falls, entries stay": [["append", [1, 2, 3]], ["drop", [2]], ["reposition"], ["append", [4]]],
    "everything dropped": [
        ["append", [1, 2, 3]],
        ["drop", [0, 1, 2]],
        ["append", [4]],
        ["reposition"],
        ["append", [5]],
    ],
    "two repositions": [["append", [1, 2, 3, 4, 5]], ["drop", [1]], ["reposition"], ["drop", [0]], ["reposition"]],
    "full of operations that do nothing": [
        ["reposition"],
        ["append", [1]],
        ["append", [2, 3]],
        ["drop", []],
        ["reposition"],
        ["drop", [1]],
        ["append", []],
        ["drop", [0, 1]],
        ["append", [4]],
        ["drop", [0, 1]],
        ["reposition"],
        ["reposition"],
    ],
    "drops are not merged across a reposition": [
        ["append", [1, 2, 3, 4]],
        ["drop", [1]],
        ["reposition"],
        ["drop", [2]],
        ["append", [5]],
    ],
    "keep the head and the tail of a long run": [
        ["append", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]],
        ["drop", [3, 4, 5, 6]],
        ["append", [11]],
        ["reposition"],
        ["append", [12, 13]],
    ],
}

#: What is not given is as in CLOSURE_DEFAULTS. `wanted` None is the last token; `windows` has one item a layer.
CLOSURE_DEFAULTS: dict[str, Any] = {"resident": [], "wanted": None, "windows": [None]}
CLOSURES: dict[str, dict[str, Any]] = {
    "nothing at hand": {"history": [["append", [1, 2, 3]]]},
    "everything at hand": {"history": [["append", [1, 2, 3]]], "resident": [0, 1, 2]},
    "dropped before anything needed reads it": {"history": [["append", [1, 2]], ["drop", [1]], ["append", [3]]]},
    "dropped after something needed has read it": {"history": [["append", [1, 2, 3]], ["drop", [1]], ["append", [4]]]},
    "dropped, evicted, and not needed": {
        "history": [["append", [1, 2, 3]], ["drop", [1]], ["append", [4]]],
        "resident": [0, 2],
    },
    "evicted chain": {
        "history": [["append", [1, 2]], ["drop", [0]], ["append", [3]], ["drop", [1]], ["append", [4]]],
    },
    "read with a shift": {
        "history": [["append", [1, 2, 3]], ["drop", [1]], ["reposition"], ["append", [4, 5]]],
        "resident": [0, 1, 2, 3, 4],
    },
    "the last appended is dropped": {"history": [["append", [1, 2, 3]], ["drop", [1, 2]]], "resident": [0, 1]},
    "logits of a resident token": {
        "history": [["append", [1, 2, 3]], ["drop", [0]], ["append", [4]]],
        "resident": [1, 2, 3],
        "wanted": [1],
    },
    "windows alone": {
        "history": [["append", [1, 2, 3, 4, 5, 6]], ["drop", [0, 1, 2, 3]], ["append", [7]]],
        "resident": [4],
        "windows": [1, 2],
    },
    "brought back into a window": {
        "history": [
            ["append", [1, 2, 3, 4, 5]],
            ["drop", [1, 2, 3, 4]],
            ["reposition"],
            ["append", [6]],
            ["drop", [0]],
        ],
        "windows": [2],
    },
}

SHARED: dict[str, tuple[str, str]] = {
    "one token apart": ("plain", "position trace"),
    "the same tokens after other operations": ("late route: A B C, drop A", "between: A B, drop A, C"),
    "a drop that one of them has not": ("reposition before the append", "reposition after the append"),
    "all of the shorter": ("position trace", "reposition before the append"),
}

MESSAGES = [[10, 11], [20, 21, 22], [30], [40, 41, 42, 43]]
REQUESTS: dict[str, dict[str, Any]] = {
    "no edits": {},
    "drop, then reposition": {"drop": {"2": [[1, 0, None]]}, "reposition": [2]},
    "a message drops itself": {"drop": {"1": [[1, 0, None]]}},
    "trailing boundary": {"drop": {"3": [[0, 0, None], [2, 0, None]]}, "reposition": [3]},
    "head and tail kept": {"drop": {"3": [[3, 1, -1]]}},
    "overlapping ranges": {"drop": {"3": [[3, -3, None], [3, 0, 2], [1, 1, 2]]}},
    "trigger past the end": {"drop": {"7": [[0, 0, None]]}, "reposition": [7]},
    "cumulative schedule": {"drop": {"1": [[0, 0, None]], "3": [[0, 0, None], [1, 0, None]]}, "reposition": [1, 3]},
    "continued": {
        "drop": {"0": [[0, 0, None]], "3": [[1, 0, None]]},
        "reposition": [3],
        "continued": True,
        "generation_prompt": [],
    },
}

ROTARIES = {
    "half": Rotary(8),
    "interleaved": Rotary(8, style="interleaved"),
    "partial": Rotary(4, base=500_000.0),
    "linear": Rotary(8, scaling=RotaryScaling("linear", 4.0)),
    "llama3": Rotary(8, base=500_000.0, scaling=RotaryScaling("llama3", 32.0, original_context=8192)),
    "yarn": Rotary(8, base=1_000_000.0, scaling=RotaryScaling("yarn", 4.0, original_context=32768)),
    "yarn, interleaved, partial, not truncated": Rotary(
        dim=6,
        base=150_000.0,
        style="interleaved",
        scaling=RotaryScaling("yarn", 32.0, original_context=4096, truncate=False),
    ),
}

SMALL: dict[str, Any] = {"vocab_size": 14, "hidden_size": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
SMALL |= {"intermediate_size": 12, "max_positions": 64}
CONFIGS = [
    ModelConfig(name="plain", layers=(Layer(Rotary(8)),) * 2, tie_embeddings=True, **SMALL),
    ModelConfig(
        name="window, sinks, biases, q/k norm, YaRN, partial",
        layers=(
            Layer(Rotary(8, 50.0, scaling=RotaryScaling("yarn", 4.0, original_context=8, beta_fast=2.0)), window=3),
            Layer(Rotary(4, 100.0, style="interleaved")),
        ),
        **{**SMALL, "qk_norm": True, "attention_bias": True, "attention_sinks": True},
    ),
    ModelConfig(name="experts", layers=(Layer(Rotary(8)),) * 2, moe=MoE(4, 2, 6), **SMALL),
]


def to_lists(history: Iterable[Operation]) -> list[list]:
    """A history as JSON has it."""

    def one(operation: Operation) -> list:
        match operation:
            case Append(tokens):
                return ["append", list(tokens)]
            case Drop(indices):
                return ["drop", sorted(indices)]
            case Reposition():
                return ["reposition"]

    return [one(operation) for operation in history]


def from_lists(operations: Iterable[list]) -> History:
    """The inverse of `to_lists`."""

    def one(name: str, *arguments: list[int]) -> Operation:
        match name, arguments:
            case "append", [tokens]:
                return Append(tuple(tokens))
            case "drop", [indices]:
                return Drop(frozenset(indices))
            case "reposition", []:
                return Reposition()
        raise ValueError(f"no operation: {[name, *arguments]}")

    return tuple(one(*operation) for operation in operations)


def histories() -> list[dict]:
    def case(name: str, operations: list) -> dict:
        history = from_lists(operations)
        result = run(None, history)
        return {
            "name": name,
            "history": operations,
            "canonical": to_lists(canonical(history)),
            "positions": [query.position for query in result.queries],
            "views": [[list(read) for read in query.view] for query in result.queries],
            "segments": [
                {"queries": list(segment.queries), "view": [list(read) for read in segment.view]}
                for segment in result.segments
            ],
            "active": [[entry.index, entry.position, entry.birth] for entry in result.state.active],
            "next_position": result.state.n,
        }

    return [case(name, operations) for name, operations in HISTORIES.items()]


def closures() -> list[dict]:
    def case(name: str, given: dict[str, Any]) -> dict:
        history, resident, windows = from_lists(given["history"]), given["resident"], given["windows"]
        counted = usage(history, resident, windows)
        return {
            "name": name,
            **given,
            "computed": sorted(closure(history, resident, given["wanted"], windows)),
            "usage": {kind: sorted(indices) for kind, indices in asdict(counted).items()},
        }

    return [case(name, {**CLOSURE_DEFAULTS, **given}) for name, given in CLOSURES.items()]


def sharing() -> list[dict]:
    def case(name: str, a: list, b: list) -> dict:
        return {"name": name, "a": a, "b": b, **common_prefix(from_lists(a), from_lists(b))._asdict()}

    return [case(name, HISTORIES[a], HISTORIES[b]) for name, (a, b) in SHARED.items()]


def requests() -> list[dict]:
    def case(name: str, edits: dict[str, Any]) -> dict:
        request = {"messages": MESSAGES, "generation_prompt": [99], "drop": {}, "reposition": [], "continued": False}
        request |= edits
        drop = {int(trigger): [TokenRange(*part) for part in parts] for trigger, parts in request["drop"].items()}
        history = canonical(history_of(**{**request, "drop": drop}))
        return {"name": name, **request, "canonical": to_lists(history)}

    return [case(name, edits) for name, edits in REQUESTS.items()]


def rotaries() -> list[dict]:
    def case(name: str, rotary: Rotary) -> dict:
        k = np.array([0.5, -1.0, 1.5, 2.0, -0.25, 0.75, 1.25, -1.75])
        at_90 = encode(rotary, k, 90)
        return {
            "name": name,
            "rotary": asdict(rotary),
            "inverse_frequencies": rounded(inverse_frequencies(rotary)),
            "magnitude": rounded(magnitude(rotary)),
            "k": k.tolist(),
            "encoded_at_90": rounded(at_90),
            "then_moved_to_30": rounded(rotate(rotary, at_90, 30 - 90)),
        }

    return [case(name, rotary) for name, rotary in ROTARIES.items()]


def logits() -> list[dict]:
    histories = ["position trace", "full of operations that do nothing", "keep the head and the tail of a long run"]

    def case(config: ModelConfig, params: dict[str, Any]) -> dict:
        model = Model.of(config, params)
        runs = [
            {"history": HISTORIES[name], "logits": rounded(run(model, from_lists(HISTORIES[name])).logits)}
            for name in histories
        ]
        return {"name": config.name, "config": asdict(config), "params": params, "runs": runs}

    return [case(config, short_params(config, seed)) for seed, config in enumerate(CONFIGS)]


def short_params(config: ModelConfig, seed: int) -> dict[str, Any]:
    """Random parameters of three decimals, as lists: what is in the file is exactly what was used."""

    def short(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return np.round(value, 3).tolist()
        if isinstance(value, dict):
            return {name: short(inner) for name, inner in value.items()}
        return [short(inner) for inner in value]

    return short(random_params(config, seed))


def rounded(value: Any) -> Any:
    """12 decimals: no two machines agree on the rest."""
    return np.round(value, 12).tolist()


FILES: dict[str, Callable[[], list[dict]]] = {
    "histories.json": histories,
    "closures.json": closures,
    "sharing.json": sharing,
    "requests.json": requests,
    "rope.json": rotaries,
    "logits.json": logits,
}


def dump(cases: list[dict]) -> str:
    """JSON with one line a key, so that a change can be read as a diff."""
    blocks = [",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in case.items()) for case in cases]
    return "[\n {\n" + "\n },\n {\n".join(blocks) + "\n }\n]\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, make in FILES.items():
        (FOLDER / name).write_text(dump(make()), encoding="utf-8")
        print(f"wrote {FOLDER.name}/{name}")


if __name__ == "__main__":
    main()
