"""Runs hypothesis' state machines over the engine."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def play(make: Callable[[], RuleBasedStateMachine], episodes: int, rules: int, *, derandomize: bool) -> None:
    """That many episodes of so many rules; derandomized, the same ones every time."""
    run_state_machine_as_test(
        make,
        settings=settings(
            max_examples=episodes,
            stateful_step_count=rules,
            deadline=None,
            derandomize=derandomize,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
