"""What reuse, drops and repositions cost in time to first token, and planning on the host: one run, one machine.

`python -m benchmarks.cache_speed` runs these against the real server, over HTTP, and prints medians and ratios:

- reuse: turn 20 of an agent's conversation, whose 19 turns before were served, and the same request of an empty cache;
- drop: a turn that newly drops an old tool message, after the new tool message or before it, and the same turn without;
- reposition: a conversation that is cached, whose middle is dropped and the rest repositioned, and a plain prompt;
- planning (see `planning.py`): host time of plan and match against length, of pages against the pool's size.

What is compared is measured in turn, so that a drift of the machine's speed meets both. Needs httpx (`test` extra).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from akv_jax.config import EngineConfig, RepositionMode
from akv_jax.engine import Engine
from akv_jax.models.load import LoadedModel, load_model
from benchmarks.local_server import Answer, ask_now, serving
from benchmarks.planning import PageCosts, page_costs, plan_and_match
from benchmarks.report import add_common_flags, machine, write_json
from benchmarks.trajectories import prose

#: Tokens around the text of one message; roughly, for the lengths below are round numbers anyhow.
_HEADER = 5
MODES: tuple[RepositionMode, ...] = ("on_read", "copy")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of the conversations."""

    reuse_turns: int = 20
    reuse_tokens: int = 4000
    drop_old: int = 1000
    drop_new: int = 200
    reposition_tokens: int = 5000
    reposition_dropped: int = 1000
    plain_prompt: int = 512


@dataclass(frozen=True, slots=True)
class Figure:
    """Median seconds to the first token of something and of what it is compared with. asked: largest ratio wanted."""

    what: str
    against: str
    seconds: float
    against_seconds: float
    asked: float | None
    computed: int
    against_computed: int

    @property
    def ratio(self) -> float:
        return self.seconds / self.against_seconds


class Texts:
    """Messages of given lengths whose words are never the same twice."""

    def __init__(self, model: LoadedModel, seed: int = 0) -> None:
        self._tokenizer, self._random = model.tokenizer, np.random.default_rng(seed)

    def message(self, role: str, tokens: int) -> Message:
        """About that many tokens, header included."""
        size = max(1, tokens - _HEADER)
        words = prose(self._random, size)
        return {"role": role, "content": self._tokenizer.decode(self._tokenizer.encode(words)[:size])}

    def exchange(self, tool: int, assistant: int) -> list[Message]:
        """An assistant message and the tool's answer."""
        return [self.message("assistant", assistant), self.message("tool", tool)]


def ask_first(url: str, messages: Sequence[Message], cache: dict[str, Any] | None = None) -> Answer:
    """One token."""
    return ask_now(url, {"messages": messages, "max_tokens": 1, **({"cache": cache} if cache else {})})


def figure(what: str, against: str, ours: list[Answer], theirs: list[Answer], asked: float | None) -> Figure:
    """Of answers measured in turn."""
    return Figure(
        what,
        against,
        statistics.median(answer.first_token for answer in ours),
        statistics.median(answer.first_token for answer in theirs),
        asked,
        round(statistics.median(answer.cache["computed_tokens"] for answer in ours)),
        round(statistics.median(answer.cache["computed_tokens"] for answer in theirs)),
    )


def reuse(url: str, texts: Texts, sizes: Sizes, runs: int) -> Figure:
    """The last turn of a conversation with the cache and without."""
    turn = sizes.reuse_tokens // (sizes.reuse_turns + 1)
    warm, cold = [], []
    for _ in range(runs):
        messages = [texts.message("system", turn), texts.message("user", turn)]
        ask_first(url, messages)
        for _ in range(sizes.reuse_turns - 1):
            messages += texts.exchange(turn * 2 // 3, turn // 3)
            last = ask_first(url, messages)
        warm.append(last)
        httpx.post(f"{url}/flush_cache").raise_for_status()
        cold.append(ask_first(url, messages))
    tokens = cold[0].usage["prompt_tokens"]
    what = f"turn {sizes.reuse_turns}, {tokens:,} tokens, cached"
    return figure(what, "the same with an empty cache", warm, cold, 1 / 8)


def drop(url: str, texts: Texts, sizes: Sizes, runs: int) -> list[Figure]:
    """A turn that newly drops an old tool message, and the same turn without."""
    old, new = sizes.drop_old, sizes.drop_new
    base = [texts.message("system", new), texts.message("user", new // 2), *texts.exchange(old, 50)]
    for _ in range(4):
        base += texts.exchange(new, 50)
    ask_first(url, base)
    dropped, last = 3, len(base) + 1
    caches: dict[str, Any] = {
        "plain": None,
        "after": {"drop": {str(last): [dropped]}},
        "before": {"drop": {str(last - 1): [dropped]}},
    }
    answers: dict[str, list[Answer]] = {name: [] for name in caches}
    for _ in range(runs):
        for name, cache in caches.items():
            answers[name].append(ask_first(url, [*base, *texts.exchange(new, 50)], cache))
    return [
        figure(
            f"a turn of {new} that drops {old} old tokens {when} its tool message",
            "the same turn without the drop",
            answers[when],
            answers["plain"],
            1.2,
        )
        for when in ("after", "before")
    ]


def reposition(url: str, texts: Texts, sizes: Sizes, runs: int, mode: RepositionMode) -> list[Figure]:
    """A cached conversation whose middle is dropped and the rest repositioned, against a plain prompt."""
    half = (sizes.reposition_tokens - sizes.reposition_dropped) // 2
    messages = [texts.message("system", half // 2), texts.message("user", half - half // 2)]
    # Another run drops another range, or the edited history would be cached as well.
    messages += [texts.message("assistant", 50), texts.message("tool", sizes.reposition_dropped + _HEADER + runs)]
    messages += [texts.message("assistant", half // 2), texts.message("user", half - half // 2 - 50)]
    cold = ask_first(url, messages)
    edited, plain = [], []
    for run in range(runs):
        span = {"message": 3, "tokens": [run, run + sizes.reposition_dropped]}
        edited.append(ask_first(url, messages, {"drop": {"5": [span]}, "reposition": [5]}))
        plain.append(ask_first(url, [texts.message("user", sizes.plain_prompt)]))
    tokens = cold.usage["prompt_tokens"]
    what = f"{tokens:,} tokens cached, {sizes.reposition_dropped:,} in the middle dropped, repositioned ({mode})"
    against = f"a plain prompt of {plain[0].usage['prompt_tokens']} tokens"
    asked = 0.8 if mode == "on_read" else None
    return [
        figure(what, against, edited, plain, asked),
        figure(what, "the whole conversation with an empty cache", edited, [cold], None),
    ]


def speed(model: LoadedModel, config: EngineConfig, sizes: Sizes, runs: int) -> Iterator[Figure]:
    """All that is measured over HTTP, as it comes."""
    texts = Texts(model)
    for mode in MODES:
        with serving(lambda mode=mode: Engine(model, dataclasses.replace(config, reposition=mode))) as url:
            # The first request of a server pays for what is made at first use.
            ask_first(url, [texts.message("user", 64)])
            if mode == "on_read":
                yield reuse(url, texts, sizes, runs)
                yield from drop(url, texts, sizes, runs)
            yield from reposition(url, texts, sizes, runs, mode)


def speed_table(figures: Sequence[Figure]) -> Table:
    """A row a figure."""
    table = Table("what", "TTFT s", "computed", "against", "TTFT s", "computed", "ratio", "asked")
    for one in figures:
        asked = "" if one.asked is None else f"≤ {one.asked:g}: {'met' if one.ratio <= one.asked else 'MISSED'}"
        table.add_row(one.what, f"{one.seconds:.3f}", f"{one.computed:,}", one.against, f"{one.against_seconds:.3f}",
                      f"{one.against_computed:,}", f"{one.ratio:.3f}", asked)  # fmt: skip
    return table


def planning_table(rows: dict[str, dict[str, float]]) -> Table:
    """Times by name, a column a history."""
    table = Table("CPU ms", *rows)
    for name in next(iter(rows.values())):
        table.add_row(name, *(f"{times[name]:.2f}" for times in rows.values()))
    return table


def pages_table(costs: dict[int, PageCosts]) -> Table:
    """A row a pool."""
    table = Table("pages", "allocate µs/page", "evict µs/page", "keep µs/page", "evictable() µs/call")
    for pages, cost in costs.items():
        numbers = (cost.allocate, cost.evict, cost.keep, cost.evictable_call)
        table.add_row(f"{pages:,}", *(f"{number:.2f}" for number in numbers))
    return table


def argument_parser() -> argparse.ArgumentParser:
    """The command line."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache_speed", description=description)
    add = parser.add_argument
    add("--only", nargs="+", choices=("speed", "planning", "pages"), default=["planning", "pages", "speed"])
    add("--runs", type=int, default=3, help="repetitions of what runs the model (%(default)s)")
    add("--lengths", type=int, nargs="+", default=[10_000, 30_000, 100_000], help="tokens of planned histories")
    add("--pools", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="pages of pools")
    add("--pages", type=int, default=12_000, help="pages of the server's pool (%(default)s)")
    add("--chunk", type=int, default=256)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_common_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, and write JSON if asked."""
    arguments = argument_parser().parse_args(argv)
    jax.config.update("jax_compilation_cache_dir", str(arguments.cache_dir / "xla"))
    console, results = Console(width=max(150, Console().width)), {}
    console.print(machine())
    if "planning" in arguments.only:
        rows = {
            f"{tokens:,} tokens, {mode}": plan_and_match(tokens, mode=mode)
            for mode in MODES
            for tokens in arguments.lengths
        }
        console.print(planning_table(rows))
        results["planning"] = rows
    if "pages" in arguments.only:
        costs = {pages: page_costs(pages) for pages in arguments.pools}
        console.print(pages_table(costs))
        results["pages"] = {pages: dataclasses.asdict(cost) for pages, cost in costs.items()}
    if "speed" in arguments.only:
        model = load_model(arguments.model, arguments.dtype, arguments.cache_dir / "models", progress=False)
        config = EngineConfig(
            context_length=model.config.max_positions,
            num_pages=arguments.pages,
            max_running_requests=4,
            chunked_prefill_size=arguments.chunk,
            dtype=arguments.dtype,
        )
        figures = []
        for one in speed(model, config, Sizes(), arguments.runs):
            figures.append(one)
            console.print(f"{one.what}: {one.seconds:.3f} s; {one.against}: {one.against_seconds:.3f} s")
        console.print(speed_table(figures))
        results["speed"] = [{**dataclasses.asdict(one), "ratio": one.ratio} for one in figures]
    write_json(arguments.json, "cache, speed", vars(arguments), results)


if __name__ == "__main__":
    main()
