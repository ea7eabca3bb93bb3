"""Agents' conversations through the server, with a pool too small for all of them: `python -m benchmarks.cache [FILE]`.

FILE holds recorded runs (JSON Lines, see `trajectories.recorded`); without it, synthetic ones of a fixed seed are used.
Every agent sends its turns over HTTP to the real server (in a thread of this process), beside all the others, each turn
the whole history; the model's few words are thrown away, and the conversation goes on as recorded. Reported are hit
rates, restored tokens, evictions by class, time to first token and throughput: without operations, and with a rolling
drop of tool messages and a reposition every few turns; for each way to evict; and for both ways to reposition.

A small CPU takes an hour for one whole recorded run. So tool messages are cut (`--tool-chars`) and the first `--turns`
turns are sent; `--simulate` replays whole runs through the same scheduler and cache on a virtual clock instead.
Needs httpx (the `test` extra).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from akv_jax.chat.choose_template import chat_format
from akv_jax.config import EngineConfig, EvictionPolicy, RepositionMode
from akv_jax.engine import Engine
from akv_jax.models.load import LoadedModel, load_model
from akv_jax.runtime.runner import Runner
from benchmarks.local_server import serving
from benchmarks.recorder import Recorder
from benchmarks.replay import Outcome, RollingDrop, replay
from benchmarks.report import add_common_flags, machine, write_json
from benchmarks.simulate import Conversation, simulate
from benchmarks.trajectories import Trajectory, recorded, synthetic

#: Pools are a multiple of this.
_POOL_UNIT = 256


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the report."""

    edits: RollingDrop | None
    mode: RepositionMode
    eviction: EvictionPolicy

    @property
    def name(self) -> str:
        return "none" if self.edits is None else f"drop, {self.mode}"


def cases(edits: RollingDrop, only_reposition: bool = False) -> list[Case]:
    """Without and with operations for each way to evict, and the other way to reposition; or the last two alone."""
    if only_reposition:
        return [Case(edits, mode, "drop_aware") for mode in ("on_read", "copy")]
    plain = [Case(None, "on_read", "lru"), Case(None, "on_read", "drop_aware")]
    edited = [Case(edits, "on_read", "lru"), Case(edits, "on_read", "drop_aware")]
    return [*plain, *edited, Case(edits, "copy", "drop_aware")]


def pool_size(conversations: Sequence[Conversation], share: float) -> int:
    """Pages for that share of all conversations' last prompts, but enough for the longest one and its answer."""
    tokens = [conversation.tokens for conversation in conversations]
    pages = max(int(share * sum(tokens)), max(tokens) + _POOL_UNIT)
    return -(-pages // _POOL_UNIT) * _POOL_UNIT


def served(
    model: LoadedModel, config: EngineConfig, runs: Sequence[Case], agents: Sequence[Trajectory], arguments: Any
) -> Iterator[tuple[Case, Outcome]]:
    """Each case on a server of its own with an empty cache. Cases of one mode share their compiled programs."""
    for mode in dict.fromkeys(case.mode for case in runs):
        runner = Runner(model.config, model.params, replace(config, reposition=mode))
        for case in (case for case in runs if case.mode == mode):
            settings = replace(config, reposition=mode, eviction=case.eviction)
            engine = Engine(model, settings, runner=runner)
            recorder = Recorder(engine)
            with serving(lambda engine=engine: engine) as url:
                outcome = replay(
                    url, agents, case.edits, max_tokens=arguments.max_tokens, think_seconds=arguments.think
                )
            engine.check()
            stats = engine.stats()
            yield (
                case,
                replace(
                    outcome,
                    forwards=stats.forwards_total,
                    copies=stats.copied_pages_total,
                    peak_pages=recorder.peak_pages,
                    device_seconds=recorder.seconds,
                    pool=config.num_pages,
                ),
            )
        del runner


def simulated(
    model: LoadedModel, config: EngineConfig, runs: Sequence[Case], agents: Sequence[Conversation], arguments: Any
) -> Iterator[tuple[Case, Outcome]]:
    """The same on a virtual clock, for every size of pool."""
    for share in arguments.pool_share:
        sized = replace(config, num_pages=pool_size(agents, share))
        for case in runs:
            settings = replace(sized, reposition=case.mode, eviction=case.eviction)
            yield (
                case,
                simulate(
                    model,
                    settings,
                    agents,
                    case.edits,
                    max_tokens=arguments.max_tokens,
                    think_seconds=arguments.think,
                ),
            )


def table_of(results: Sequence[tuple[Case, Outcome]]) -> Table:
    """A row a case."""
    table = Table("operations", "eviction", "pool", "hit rate", "computed", "restored")
    table.add_column("evicted pages", no_wrap=True)
    for column in (
        "TTFT s",
        "p90",
        "turns/min",
        "prompt tok/s",
        "peak pages",
        "copies",
        "forwards",
        "device s",
        "retracted",
        "refused",
    ):
        table.add_column(column)
    for case, outcome in results:
        table.add_row(
            case.name,
            case.eviction,
            f"{outcome.pool:,}",
            f"{outcome.hit_rate:.3f}",
            f"{outcome.computed_tokens:,}",
            f"{outcome.restored_tokens:,}",
            "\n".join(f"{name} {count:,}" for name, count in outcome.evictions.items() if count) or "none counted",
            f"{outcome.first_token_median:.2f}",
            f"{outcome.first_token_p90:.2f}",
            f"{outcome.turns_per_minute:.1f}",
            f"{outcome.prompt_tokens_per_second:,.0f}",
            f"{outcome.peak_pages:,}",
            f"{outcome.copies:,}",
            f"{outcome.forwards:,}",
            f"{outcome.device_seconds:,.1f}",
            str(outcome.preemptions),
            str(outcome.refused),
        )
    return table


def argument_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("file", nargs="?", type=Path, help="recorded runs, JSON Lines, may be gzipped (default: synthetic ones)")
    add("--simulate", action="store_true", help="whole runs on a virtual clock, without a model")
    add("--only-reposition", action="store_true", help="only the two ways to reposition, with operations")
    add("--agents", type=int, default=4, help="how many run at once, the first ones of the file (%(default)s)")
    add("--skip", type=int, default=0, help="runs of the file to leave out before them (%(default)s)")
    add("--turns", type=int, help="of each run (10; all of them with --simulate)")
    add("--tool-chars", type=int, help="tool messages are cut to so many characters (1500; whole with --simulate)")
    add("--keep", type=int, help="tool messages kept by the rolling drop (4; 12 with --simulate)")
    add("--every", type=int, help="tool messages between two repositions (3; 10 with --simulate)")
    add("--pool-share", type=float, nargs="+", help="pool, as a share of all last prompts (0.4; several to simulate)")
    add("--running", type=int, default=4, help="requests in the batch (%(default)s)")
    add("--chunk", type=int, help="prompt tokens a step (256; 2048 with --simulate)")
    add("--context-length", type=int, help="positions (the model's; 131072 with --simulate)")
    add("--max-tokens", type=int, default=8, help="tokens of every answer (%(default)s)")
    add("--think", type=float, default=0.0, help="mean seconds between an answer and the next turn (%(default)s)")
    add("--seed", type=int, default=0, help="of the synthetic runs (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_common_flags(parser)
    return parser


def with_defaults(arguments: argparse.Namespace, model: LoadedModel) -> argparse.Namespace:
    """Fill in what depends on the mode."""
    small = {
        "turns": 10,
        "tool_chars": 1500,
        "keep": 4,
        "every": 3,
        "pool_share": [0.4],
        "chunk": 256,
        "context_length": model.config.max_positions,
    }
    whole = {
        "turns": None,
        "tool_chars": None,
        "keep": 12,
        "every": 10,
        "pool_share": [0.15, 0.33, 0.66, 1.2],
        "chunk": 2048,
        "context_length": 131_072,
    }
    for name, value in (whole if arguments.simulate else small).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def agents_of(arguments: argparse.Namespace) -> list[Trajectory]:
    """The runs that are asked for. ValueError if there are too few."""
    if arguments.file is None:
        found = synthetic(arguments.skip + arguments.agents, arguments.turns or 80, arguments.seed)
    else:
        found = recorded(arguments.file)
    chosen = found[arguments.skip : arguments.skip + arguments.agents]
    if len(chosen) < arguments.agents:
        raise ValueError(f"--agents {arguments.agents}: there are {len(chosen)} runs from --skip {arguments.skip} on")
    return [agent.shortened(arguments.turns, arguments.tool_chars) for agent in chosen]


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, and write JSON if asked."""
    parser = argument_parser()
    arguments = parser.parse_args(argv)
    jax.config.update("jax_compilation_cache_dir", str(arguments.cache_dir / "xla"))
    model = load_model(arguments.model, arguments.dtype, arguments.cache_dir / "models", progress=False)
    arguments = with_defaults(arguments, model)
    try:
        agents = agents_of(arguments)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    chat = chat_format(
        model.tokenizer,
        model.chat_template,
        bos_token=model.bos_token,
        eos_token=model.eos_token,
        eos_token_ids=model.eos_token_ids,
    )
    conversations = [Conversation(chat, agent) for agent in agents]
    config = EngineConfig(
        context_length=arguments.context_length,
        num_pages=pool_size(conversations, arguments.pool_share[0]),
        max_running_requests=arguments.running,
        chunked_prefill_size=arguments.chunk,
        dtype=arguments.dtype,
    )
    runs = cases(RollingDrop(arguments.keep, arguments.every), arguments.only_reposition)
    console = Console(width=max(210, Console().width))
    prompts = sum(len(conversation.tokenised(count).token_ids) for conversation in conversations for count in
                  conversation.turns)  # fmt: skip
    console.print(
        f"{machine()}\n{len(agents)} agents, {sum(len(c.turns) for c in conversations)} turns, last prompts of "
        f"{', '.join(f'{c.tokens:,}' for c in conversations)} tokens, {prompts:,} prompt tokens in all; "
        f"keep {arguments.keep}, reposition every {arguments.every}"
        + ("; virtual clock, cost model" if arguments.simulate else f"; {model.name}, {arguments.dtype}, over HTTP")
    )
    results = []
    for case, outcome in (
        simulated(model, config, runs, conversations, arguments)
        if arguments.simulate
        else served(model, config, runs, agents, arguments)
    ):
        results.append((case, outcome))
        console.print(f"{case.name}, {case.eviction}: hit rate {outcome.hit_rate:.3f}, {outcome.seconds:,.0f} s")
    console.print(table_of(results))
    rows = [{"operations": case.name, "eviction": case.eviction, **outcome.as_json()} for case, outcome in results]
    write_json(arguments.json, "cache, simulated" if arguments.simulate else "cache", vars(arguments), rows)


if __name__ == "__main__":
    main()
