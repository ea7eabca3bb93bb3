"""Prints the laws: one line for each test whose docstring states one ("L3: the survivors get ...")."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spec.model import Model, random_params
from spec.varieties import varieties

LAW = re.compile(r"^(?:[LACR]\d+(?:, )?)+: ")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the reports of a law's test carry its sentence: the first paragraph of the docstring."""
    for item in items:
        docstring = getattr(getattr(item, "function", None), "__doc__", None) or ""
        sentence = " ".join(docstring.strip().split("\n\n")[0].split())
        if item.path.is_relative_to(HERE) and LAW.match(sentence):
            item.user_properties.append(("law", sentence))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a law, in the order of the rules; a law with several cases counts them."""
    outcomes: dict[str, list[str]] = {}
    for outcome in ("failed", "error", "passed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, sentence in getattr(report, "user_properties", []):
                if name == "law":
                    outcomes.setdefault(sentence, []).append(outcome)
    if outcomes:
        terminalreporter.section("laws")
    for sentence in sorted(outcomes, key=lambda law: (law[0] != "L", law[0], int(re.findall(r"\d+", law)[0]))):
        seen = outcomes[sentence]
        verdict, colour = next(
            (v, c)
            for o, v, c in [
                ("failed", "FAILED", "red"),
                ("error", "FAILED", "red"),
                ("passed", "PASSED", "green"),
                ("skipped", "SKIPPED", "yellow"),
            ]
            if o in seen
        )
        cases = f" ({len(seen)} cases)" if len(seen) > 1 else ""
        terminalreporter.write(verdict, **{colour: True})
        terminalreporter.write_line(f"  {sentence}{cases}")


@pytest.fixture(scope="session")
def models() -> dict[str, Model]:
    """A random model of every variety."""
    return {name: Model.of(config, random_params(config, seed=7)) for name, config in varieties().items()}


@pytest.fixture(params=sorted(varieties()))
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    """Each of them in turn."""
    return models[request.param]
