"""The reports of the cache run and say what is so, at tiny size; what they measure in seconds is not looked at."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from akv_jax.chat.cache_field import parse_cache_field
from akv_jax.chat.choose_template import ChatFormat, chat_format
from akv_jax.chat.lowering import prepare_chat
from akv_jax.chat.messages import parse_messages
from akv_jax.config import EngineConfig
from akv_jax.engine import Engine
from akv_jax.models.load import LoadedModel
from akv_jax.runtime.runner import Runner
from benchmarks import cache, cache_speed
from benchmarks.cache_speed import Sizes, Texts
from benchmarks.local_server import serving
from benchmarks.planning import page_costs, plan_and_match
from benchmarks.recorder import Recorder
from benchmarks.replay import RollingDrop, evictions_of, replay
from benchmarks.simulate import Conversation, simulate
from benchmarks.trajectories import Trajectory, rolling_drop
from tests.tiny_engine import quick_compiles

EDITS = RollingDrop(keep=1, every=2)


@pytest.fixture(scope="module")
def chat(model: LoadedModel) -> ChatFormat:
    return chat_format(model.tokenizer, model.chat_template, eos_token_ids=model.eos_token_ids)


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return EngineConfig(
        context_length=2048,
        num_pages=1024,
        max_running_requests=2,
        chunked_prefill_size=64,
        max_list_entries=1 << 14,
        tile=16,
        token_buckets=(64,),
    )


@pytest.fixture(scope="module")
def runner(model: LoadedModel, config: EngineConfig) -> Runner:
    with quick_compiles():
        runner = Runner(model.config, model.params, config)
        runner.warm_up()
    return runner


def _agent(name: str, tools: int) -> Trajectory:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Mend it."}, {"role": "user", "content": name * 3}]
    for k in range(tools):
        call = {"id": "c", "type": "function", "function": {"name": "sh", "arguments": json.dumps({"x": k})}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "c", "content": f"{name} {k} " * (3 + 5 * (k % 2))})
    return Trajectory(name, (*messages, {"role": "assistant", "content": "Done."}))


AGENTS = [_agent("one", 4), _agent("two", 5), _agent("three", 3)]


@pytest.mark.parametrize("edits", [None, EDITS])
def test_a_turn_of_a_conversation_is_what_the_server_makes_of_it(chat: ChatFormat, edits: RollingDrop | None) -> None:
    agent = AGENTS[1]
    conversation = Conversation(chat, agent)
    for count in agent.turns:
        messages = agent.messages[:count]
        field = {} if edits is None else {"cache": rolling_drop(messages, edits.keep, edits.every)}
        served = prepare_chat(chat, parse_messages(messages), parse_cache_field(field))
        assert conversation.request(count, edits, "r", 1).operations == served.operations


@pytest.mark.parametrize("edits", [None, EDITS])
def test_a_simulation_reports_what_the_server_does(
    model: LoadedModel, config: EngineConfig, runner: Runner, chat: ChatFormat, edits: RollingDrop | None
) -> None:
    """One agent alone: the order of steps does not depend on time. And of one sampled token no K and V is kept, which
    might be found again. So every count is the same."""
    small = dataclasses.replace(config, num_pages=Conversation(chat, AGENTS[1]).tokens + 20)
    # The runner has more pages than that engine hands out.
    engine = Engine(model, small, runner=runner)
    recorder = Recorder(engine)
    with serving(lambda: engine) as url:
        real = replay(url, AGENTS[1:2], edits, max_tokens=1)
    virtual = simulate(model, small, [Conversation(chat, AGENTS[1])], edits, max_tokens=1)
    for name in ("turns", "prompt_tokens", "computed_tokens", "restored_tokens", "hit_rate"):
        assert getattr(real, name) == getattr(virtual, name), name
    assert (engine.stats().forwards_total, recorder.peak_pages) == (virtual.forwards, virtual.peak_pages)
    assert real.turns == 6
    assert 0 < real.hit_rate < 1


def test_a_roomy_pool_computes_every_token_once(model: LoadedModel, config: EngineConfig, chat: ChatFormat) -> None:
    agent = Conversation(chat, AGENTS[0])
    roomy = simulate(model, dataclasses.replace(config, num_pages=8192), [agent], None, max_tokens=1)
    # The generation prompt is rendered after every turn; the header of the recorded reply begins with the same tokens.
    assert roomy.computed_tokens <= agent.tokens + len(agent.turns)
    assert roomy.restored_tokens == 0
    tight = simulate(
        model,
        dataclasses.replace(config, num_pages=cache.pool_size([agent], 0.1)),
        [Conversation(chat, each) for each in AGENTS],
        None,
        max_tokens=1,
    )
    assert tight.hit_rate < roomy.hit_rate


def test_turns_that_can_never_fit_are_counted(model: LoadedModel, config: EngineConfig, runner: Runner) -> None:
    tight = dataclasses.replace(config, num_pages=150)
    chat = chat_format(model.tokenizer, model.chat_template, eos_token_ids=model.eos_token_ids)
    virtual = simulate(model, tight, [Conversation(chat, AGENTS[0])], None, max_tokens=1)
    with serving(lambda: Engine(model, tight, runner=runner)) as url:
        real = replay(url, AGENTS[:1], None, max_tokens=1)
    assert (real.turns, real.refused) == (virtual.turns, virtual.refused)
    assert real.turns > 0
    assert real.refused > 0


def test_evictions_are_told_by_class() -> None:
    before = {"akv:evicted_pages{class=dropped}": 3.0, "akv:forwards": 1.0}
    after = {"akv:evicted_pages{class=dropped}": 5.0, "akv:evicted_pages{class=finished}": 1.0, "akv:forwards": 9.0}
    assert evictions_of(before, after) == {"dropped": 2, "finished": 1}


def _report(path: Path, main: Any, arguments: Sequence[str]) -> Any:
    main([*arguments, "--json", str(path)])
    report = json.loads(path.read_text())
    assert report["machine"]
    assert report["date"]
    return report["results"]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "runs.jsonl"
    path.write_text("\n".join(json.dumps({"id": agent.name, "messages": agent.messages}) for agent in AGENTS))
    return path


def _small(tiny_directory: Path) -> list[str]:
    return ["--model", str(tiny_directory), "--cache-dir", str(tiny_directory)]


def test_the_replay_reports_every_case(model: LoadedModel, config: EngineConfig) -> None:
    # Of one mode, for each mode compiles programs of its own.
    runs = [dataclasses.replace(case, mode="copy") for case in cache.cases(EDITS)]
    arguments = argparse.Namespace(max_tokens=2, think=0.0)
    with quick_compiles():
        results = list(cache.served(model, config, runs, AGENTS, arguments))
    assert [case for case, _ in results] == runs
    for case, outcome in results:
        assert outcome.turns == sum(len(agent.turns) for agent in AGENTS)
        assert 0 < outcome.hit_rate < 1
        assert 0 < outcome.peak_pages <= outcome.pool
        assert (outcome.copies > 0) == (case.edits is not None)
    cache.table_of(results)


def test_the_simulation_reports_every_pool(tiny_directory: Path, tmp_path: Path) -> None:
    small = ["--simulate", "--agents", "2", "--turns", "3", "--tool-chars", "50", "--pool-share", "0.5", "2"]
    rows = _report(tmp_path / "out.json", cache.main, [*small, *_small(tiny_directory), "--context-length", "8192"])
    assert len({row["pool"] for row in rows}) == 2
    assert all(row["turns"] == 6 for row in rows)
    assert rows[0]["restored_tokens"] > 0
    assert rows[-1]["restored_tokens"] == 0


def test_too_few_runs_are_an_error(tiny_directory: Path, recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cache.main([str(recording), *_small(tiny_directory), "--agents", "4"])
    assert "--agents 4: there are 3 runs" in capsys.readouterr().err


def test_the_figures_of_speed(model: LoadedModel, config: EngineConfig, runner: Runner) -> None:
    sizes = Sizes(
        reuse_turns=4,
        reuse_tokens=400,
        drop_old=120,
        drop_new=60,
        reposition_tokens=600,
        reposition_dropped=120,
        plain_prompt=80,
    )
    texts = Texts(model)
    with serving(lambda: Engine(model, dataclasses.replace(config, num_pages=1024), runner=runner)) as url:
        reused = cache_speed.reuse(url, texts, sizes, 1)
        dropping = cache_speed.drop(url, texts, sizes, 1)
        edited, _ = cache_speed.reposition(url, texts, sizes, 2, "on_read")
    # About a turn's new tokens of all that there are.
    assert reused.computed < reused.against_computed / 2
    for figure in dropping:
        # The generation prompt, at most, is computed more.
        assert figure.computed <= figure.against_computed + 60
        assert figure.computed < sizes.drop_old + 2 * sizes.drop_new
    # What is repositioned is not computed again.
    assert edited.computed < 40
    assert edited.against_computed >= sizes.plain_prompt - 5
    cache_speed.speed_table([reused, *dropping, edited])


def test_the_figures_of_planning() -> None:
    for mode in cache_speed.MODES:
        times = plan_and_match(2000, 60, runs=2, mode=mode)
        assert times["plan and match"] >= times["  Timeline"] > 0
        cache_speed.planning_table({"2,000": times})
    costs = page_costs(2000, path=100, fresh=50, runs=1)
    assert min(costs.allocate, costs.evict, costs.keep) > 0
    cache_speed.pages_table({2000: costs})
