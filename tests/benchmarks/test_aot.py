"""The AOT gate's reading and judging, on texts as the compilers write them: a gate that cannot fail is a defect.

What it does with the compilers themselves, `make aot` shows, which has a control of its own.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.aot import reading, shapes
from benchmarks.aot.judge import judge_kernels, judge_reposition, judge_step, needed
from benchmarks.aot.memory import estimate

PTXAS = """\
I1130 08:09:57.994178    8177 subprocess_compilation.cc:283] ptx written to: /tmp/tempfile
I1130 08:09:57.022613    8177 subprocess_compilation.cc:356] ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'loop_add_fusion' for 'sm_80'
ptxas info    : Function properties for loop_add_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 368 bytes cmem[0]
ptxas info    : Compile time = 5.037 ms
I1130 08:09:58.022613    8177 subprocess_compilation.cc:356] ptxas warning : Registers are spilled to local memory
ptxas info    : Compiling entry function 'walk' for 'sm_80'
ptxas info    : Function properties for walk
    144 bytes stack frame, 144 bytes spill stores, 148 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 408 bytes cmem[0]
"""

THUNKS = """\
001: kPartitionId  [source       | next=002 (1)] kPartitionId
002: kCustomKernel [prev=001 (1) | sink] loop_add_fusion grid: [1440, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
013: kWhile        [prev=012 (1) | next=052 (1)]
condition:
    014: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    015: kCustomKernel [source | sink] walk grid: [49, 45, 1] threads: [32, 4, 1]  shared_memory: 40960 bytes
"""

#: One layer: K is updated in place, V is not, for the copy before it; a loop reads the pool.
HLO = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {1}: (1, {}, may-alias), {2}: (2, {}, may-alias) }

%fused_scatter (p.0: bf16[101,16], p.1: bf16[8,16]) -> bf16[101,16] {
  %p.0 = bf16[101,16]{1,0} parameter(0)
  %p.1 = bf16[8,16]{1,0} parameter(1)
  ROOT %scatter.1 = bf16[101,16]{1,0} scatter(%p.0, %p.1), update_window_dims={1}
}

%fused_two (p.2: bf16[101,16], p.3: bf16[101,16]) -> (bf16[101,16], bf16[8]) {
  %p.2 = bf16[101,16]{1,0} parameter(0)
  %p.3 = bf16[101,16]{1,0} parameter(1)
  %dynamic-update-slice.1 = bf16[101,16]{1,0} dynamic-update-slice(%p.2, %p.3)
  %reduce.1 = bf16[8]{0} reduce(%p.3)
  ROOT %tuple.1 = (bf16[101,16]{1,0}, /*index=1*/bf16[8]{0}) tuple(%dynamic-update-slice.1, %reduce.1)
}

%body (state: (s32[], bf16[101,16])) -> (s32[], bf16[101,16]) {
  %state = (s32[], bf16[101,16]{1,0}) parameter(0)
  %all-reduce.9 = f32[8,4]{1,0} all-reduce(%state), replica_groups={{0,1,2,3}}
  ROOT %tuple.2 = (s32[], bf16[101,16]{1,0}) tuple(%state, %state)
}

ENTRY %main (x: f32[8,4], keys: bf16[101,16], values: bf16[101,16]) -> (f32[8,4], bf16[101,16]) {
  %keys = bf16[101,16]{1,0} parameter(1)
  %values = bf16[101,16]{1,0} parameter(2)
  %all-reduce-start = f32[8,4]{1,0} all-reduce-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}
  %all-reduce-done = f32[8,4]{1,0} all-reduce-done(%all-reduce-start)
  %input_scatter_fusion = bf16[101,16]{1,0} fusion(%keys, %x), kind=kInput, calls=%fused_scatter
  %two_fusion = (bf16[101,16]{1,0}, bf16[8]{0}) fusion(%keys, %x), kind=kLoop, calls=%fused_two
  %moved = (bf16[101,16]{1,0}, bf16[101,16]{1,0}) custom-call(%keys), output_to_operand_aliasing={{0}: (0, {})}
  %while.1 = (s32[], bf16[101,16]{1,0}) while(%tuple), condition=%condition, body=%body
  %all-gather-start = (f32[8,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%x), dimensions={0}
  ROOT %tuple.3 = (f32[8,4]{1,0}, bf16[101,16]{1,0}) tuple(%x, %keys)
}
"""
POOL = "bf16[101,16]"
#: Names from XLA's own thunk sequences.
FUSED = ("loop_add_fusion", "input_scatter_fusion_14", "wrapped_slice", "gemm_fusion_dot_8", "sort_92_1", "fusion_328")


def observed(**changes: Any) -> dict[str, Any]:
    """What a step of two layers looks like with which nothing is wrong."""
    kernel = {"name": "walk", "registers": 128, "spill_stores": 0, "spill_loads": 0}
    memory = {"arguments": 900, "outputs": 410, "temporaries": 50, "aliases": 400}
    collectives = {"all-reduce": 5, "all-gather": 1}
    return {"kernels": [kernel], "collectives": collectives, "copies": [], "donated": 4, **memory, **changes}


def judged(**changes: Any) -> list[str]:
    return judge_step(observed(**changes), layers=2, pool=400, more=40, budget=1000)


def test_registers_and_spills_of_every_kernel() -> None:
    plain, spilling = reading.kernels(PTXAS)
    assert plain == reading.Kernel("loop_add_fusion", 8, 0, 0)
    assert spilling == reading.Kernel("walk", 255, 144, 148)
    assert (plain.spills, spilling.spills) == (False, True)


def test_a_log_that_has_no_numbers_is_refused() -> None:
    """Another ptxas may write something else: then nothing may pass for lack of spills."""
    with pytest.raises(ValueError, match="registers or spills of walk"):
        reading.kernels(PTXAS.replace("144 bytes spill stores", "144 bytes in local memory"))


def test_launches_in_loops_count() -> None:
    names = [(launch.name, launch.threads, launch.shared_memory) for launch in reading.launches(THUNKS)]
    assert names == [("loop_add_fusion", 128, 0), ("wrapped_compare", 1, 0), ("walk", 128, 40960)]
    assert reading.launches(THUNKS)[2].grid == (49, 45, 1)


def test_collectives_wherever_they_are() -> None:
    assert reading.collectives(HLO) == {"all-reduce": 2, "all-gather": 1}


def test_updates_in_place_are_no_copies() -> None:
    """A scatter, an update, a kernel that writes over its operand, and a loop that carries the pool."""
    assert reading.copies(HLO, POOL) == []
    assert reading.donated(HLO) == 2


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("%copy.7 = bf16[101,16]{1,0} copy(%values)", "copy.7 (copy)"),
        (
            "%copy-start.7 = (bf16[101,16]{1,0}, bf16[101,16]{1,0}, u32[]) copy-start(%values)",
            "copy-start.7 (copy-start)",
        ),
        (
            '%made = (bf16[101,16]{1,0}, bf16[8]{0}) custom-call(%values), custom_call_target="kernel"',
            "made (custom-call)",
        ),
        ("%widened = bf16[101,16]{1,0} fusion(%values), kind=kLoop, calls=%fused_convert", "widened (convert)"),
        ("%gathered = bf16[101,16]{1,0} all-gather(%values), dimensions={1}", "gathered (all-gather)"),
    ],
)
def test_copies_are_found_anywhere(line: str, found: str) -> None:
    """In a loop's body too."""
    convert = "%fused_convert (p.5: f32[101,16]) -> bf16[101,16] {\n  ROOT %c = bf16[101,16]{1,0} convert(%p.5)\n}\n\n"
    header, rest = HLO.split("\n\n", 1)
    for place in ("  %keys = bf16", "  %all-reduce.9"):
        changed = rest.replace(place, f"  {line}\n{place}")
        assert changed != rest
        called = convert if "%fused_convert" in line else ""
        assert reading.copies(f"{header}\n\n{called}{changed}", POOL) == [found]


def test_sizes_and_the_largest_arrays() -> None:
    assert reading.size("bf16[101,16]") == 2 * 101 * 16
    assert reading.largest(HLO, 2) == ["bf16[101,16]", "f32[32,4]"]


def test_a_step_with_which_nothing_is_wrong() -> None:
    assert judged() == []
    assert needed(observed()) == 960


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"kernels": [{"name": "walk", "registers": 255, "spill_stores": 8, "spill_loads": 0}]}, "walk spills"),
        ({"aliases": 300, "donated": 3, "outputs": 300}, "not updated in place"),
        ({"donated": 3}, "not updated in place"),
        ({"copies": ["copy.7 (copy)"]}, "copied by copy.7"),
        ({"collectives": {"all-reduce": 6, "all-gather": 1}}, "unexpected collectives"),
        ({"collectives": {"all-reduce": 5, "all-gather": 1, "all-to-all": 1}}, "unexpected collectives"),
        ({"collectives": {"all-reduce": 5}}, "unexpected collectives"),
        ({"temporaries": 51}, "GB a device"),
        ({"error": "RESOURCE_EXHAUSTED: shared memory"}, "RESOURCE_EXHAUSTED"),
    ],
)
def test_each_failure_is_named(changes: dict[str, Any], failure: str) -> None:
    """And nothing else is."""
    (found,) = judged(**changes)
    assert failure in found


def test_a_kernel_that_spills_or_is_refused_fails() -> None:
    assert judge_kernels(observed()) == []
    assert judge_kernels({"error": "ValueError: no", "seconds": 1.0}) == ["ValueError: no"]
    (failure,) = judge_kernels(observed(kernels=[{"name": "k", "registers": 9, "spill_stores": 0, "spill_loads": 4}]))
    assert "0 bytes stored, 4 loaded" in failure


def test_what_xla_fuses_may_spill() -> None:
    """Nobody chooses how: it is shown, and fails nothing."""
    fused = [{"name": name, "registers": 40, "spill_stores": 4, "spill_loads": 4} for name in FUSED]
    assert judge_kernels(observed(kernels=fused)) == []
    ours = [{**fused[0], "name": name} for name in ("_walk__1", "_merge", "grouped_matmul", "reposition", "mine")]
    assert len(judge_kernels(observed(kernels=fused + ours))) == len(ours)


def test_pools_of_a_reposition_are_written_in_place() -> None:
    moved = {"donated": 2, "temporaries": 16}
    assert judge_reposition(observed(**moved)) == []
    for change in ({"donated": 1}, {"temporaries": 200}):
        (failure,) = judge_reposition(observed(**{**moved, **change}))
        assert "not updated in place" in failure
    assert judge_reposition({"error": "no"}) == ["no"]


def test_arithmetic_of_a_known_model() -> None:
    """GPT-OSS-120B has 117 billion parameters, and a page of 8 KV heads of 64, K and V, in 36 layers and bfloat16."""
    told = estimate(shapes.GPT_OSS_120B, 4, rows=1, list_entries=0, positions=0, logit_rows=1)
    assert 4 * told.weights == pytest.approx(2 * 116.8e9, rel=0.005)
    assert 4 * told.page == 2 * 36 * 8 * 64 * 2
    assert told.largest_pool(told.weights + told.temporaries + 10 * told.page) == 10
    # And Qwen3-30B-A3B has 30.5 billion.
    assert 4 * estimate(shapes.QWEN3_30B_A3B, 4, 1, 0, 0, 1).weights == pytest.approx(2 * 30.5e9, rel=0.005)
