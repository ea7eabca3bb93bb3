"""Medians, and what the device can do at best, measured in the same process. Needs JAX and NumPy only."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Limits(NamedTuple):
    """What was measured of the device: bytes a second read and written by a plain copy, FLOP/s of a large matmul."""

    copy: float
    matmul: float


def medians(functions: Mapping[str, Callable[[], Any]], runs: int) -> dict[str, float]:
    """Median seconds of each function, called in turn, so that a drift of the machine's speed meets all of them.

    Each is called once before, and what it returns is waited for.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        jax.block_until_ready(function())
    for _ in range(runs):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(of) for name, of in times.items()}


def repeated_seconds(
    step: Callable[..., Any], carry: Any, *constants: Any, seconds: float = 0.2, runs: int = 5
) -> float:
    """Seconds of one `carry = step(carry, *constants)`, where calling it costs as much as running it: on a GPU.

    It is run many times in one executable, as often as takes about `seconds`; the median of several such runs. `carry`
    is given up (donated).
    """

    @functools.partial(jax.jit, donate_argnums=1)
    def many(times: Any, carry: Any, *constants: Any) -> Any:
        return jax.lax.fori_loop(0, times, lambda _, carry: step(carry, *constants), carry)

    def timed(times: int) -> float:
        nonlocal carry
        start = time.perf_counter()
        carry = jax.block_until_ready(many(times, carry, *constants))
        return time.perf_counter() - start

    timed(1)
    # Calling costs something too: it is taken off.
    once, more = timed(1), timed(11)
    each = max((more - once) / 10, 1e-6)
    times = max(1, min(1000, round(seconds / each)))
    return statistics.median(timed(times) - timed(0) for _ in range(runs)) / times


def product_seconds(function: Any, arguments: tuple[Any, ...], **effort: Any) -> float:
    """Of one `function(x, *others)` -> [R, O] that is no smaller for being run in a loop."""

    def step(carry: Any, *others: Any) -> Any:
        x, out = carry
        # Each run needs the one before, or XLA would run it once.
        x = x.at[0, 0].set(out[0, 0].astype(x.dtype))
        return x, function(x, *others)

    x, *others = arguments
    return repeated_seconds(step, (x, jnp.zeros_like(jax.eval_shape(function, *arguments))), *others, **effort)


def limits(*, copied: int, side: int, dtype: Any) -> Limits:
    """Of a copy of `copied` bytes, and of a product of square matrices."""
    numbers = jnp.ones(copied // 4, jnp.float32)
    seconds = repeated_seconds(lambda x: x * -1, numbers)
    square = jnp.full((side, side), 1 / side, dtype)
    product = repeated_seconds(lambda a, b: (a @ b).astype(dtype), square, jnp.copy(square))
    return Limits(2 * numbers.nbytes / seconds, 2 * side**3 / product)
