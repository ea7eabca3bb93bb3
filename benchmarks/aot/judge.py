"""What the gate demands of what was observed (see `child.observe`): plain values in, sentences about failures out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.aot.memory import billions

#: Names that XLA gives to what it fuses by itself; every other kernel is taken for one of ours.
_FUSED = re.compile(r"(loop|input|wrapped|sort|fusion|gemm_fusion|triton_softmax|transpose|cub|concatenate)_")


def is_ours(kernel: str) -> bool:
    """Whether somebody chose how a kernel of that name is cut up: what XLA makes is shown, but nobody's choice."""
    return _FUSED.match(kernel) is None


def judge_kernels(seen: Mapping[str, Any]) -> list[str]:
    """No kernel of ours spills. A compiler's refusal is a failure too."""
    if "error" in seen:
        return [str(seen["error"])]
    return [
        f"{kernel['name']} spills: {kernel['spill_stores']} bytes stored, {kernel['spill_loads']} loaded, "
        f"with {kernel['registers']} registers"
        for kernel in seen["kernels"]
        if is_ours(kernel["name"]) and (kernel["spill_stores"] or kernel["spill_loads"])
    ]


def judge_reposition(seen: Mapping[str, Any]) -> list[str]:
    """Nor does one that moves pages make another pool of K or of V beside the two that it is given."""
    failures = judge_kernels(seen)
    if "error" not in seen and (seen["donated"] != 2 or seen["temporaries"] >= seen["aliases"] // 2):
        failures.append(
            f"the pools are not updated in place: {seen['donated']} of 2 are, beside {seen['temporaries']:,} bytes"
        )
    return failures


def judge_step(seen: Mapping[str, Any], *, layers: int, pool: int, more: int, budget: int) -> list[str]:
    """A step of that many layers with a pool of that many bytes a device, over several devices (DESIGN R3, R5).

    The pool is updated in place, nothing is communicated but two sums a layer, one of the embedding and the logits, and
    all of it fits into `budget` bytes a device, `more` of which are the arguments of layers that were not compiled.
    """
    if (failures := judge_kernels(seen)) and "error" in seen:
        return failures
    if seen["aliases"] < pool or seen["donated"] != 2 * layers:
        failures.append(
            f"the pool is not updated in place: of its {2 * layers} arrays {seen['donated']} are, "
            f"{billions(seen['aliases'])} of {billions(pool)} GB"
        )
    if seen["copies"]:
        failures.append(f"the pool is copied by {', '.join(seen['copies'])}")
    expected = {"all-reduce": 1 + 2 * layers, "all-gather": 1}
    if dict(seen["collectives"]) != expected:
        failures.append(f"unexpected collectives: {dict(seen['collectives'])}, expected {expected}")
    if (total := needed(seen) + more) > budget:
        failures.append(f"{billions(total)} GB a device, more than {billions(budget)}")
    return failures


def needed(seen: Mapping[str, Any]) -> int:
    """Bytes a device while the step runs."""
    return seen["arguments"] + seen["outputs"] + seen["temporaries"] - seen["aliases"]
