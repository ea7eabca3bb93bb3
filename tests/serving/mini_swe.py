"""A mini-swe-agent episode against a server: its own prompts and loop, through litellm, with `cache` in every body."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serving.running import Running


class NoShell:
    """Runs nothing, whatever the model thinks of."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def execute(self, action: dict, cwd: str = "") -> dict[str, Any]:
        self.commands.append(action["command"])
        return {"output": "sh: not found\r\n\x1b[0m", "returncode": 127, "exception_info": ""}

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        return {"system": "Linux", "release": "6", "version": "1", "machine": "x86_64"}

    def serialize(self) -> dict[str, Any]:
        return {}


def run_episode(
    server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int, **fields: Any
) -> tuple[Any, NoShell]:
    """To its end after so many replies; an error of the protocol would end it otherwise, and is a failure.

    Skips without the package. `folder` is where it keeps what is its own; `fields` go into every body.
    """
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(folder))
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    pytest.importorskip("minisweagent")
    import yaml
    from minisweagent.agents.default import AgentConfig, DefaultAgent
    from minisweagent.config import builtin_config_dir
    from minisweagent.models.litellm_model import LitellmModel

    config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
    cache = {"drop": {str(k): [k - 2] for k in range(4, 2 * steps + 4)}, "reposition": list(range(4, 2 * steps, 2))}
    body = {"max_tokens": 100, "temperature": 1.0, "seed": 3, "extra_body": {"cache": cache}, **fields}
    model = LitellmModel(
        **{
            **config["model"],
            "model_name": "openai/any",
            "model_kwargs": {"api_base": f"{server.url}/v1", "api_key": "any", **body},
        },
        cost_tracking="ignore_errors",
    )
    settings = {k: v for k, v in config["agent"].items() if k in AgentConfig.model_fields}
    shell = NoShell()
    agent = DefaultAgent(model, shell, **{**settings, "step_limit": steps, "max_consecutive_format_errors": 0})
    result = agent.run("say hello")
    assert (result["exit_status"], agent.n_calls) == ("LimitsExceeded", steps)
    roles = [message["role"] for message in agent.messages]
    assert roles[:2] == ["system", "user"] and roles[-1] == "exit"
    return agent, shell
