"""What the HTTP server is told from outside. The only file that reads environment variables (DESIGN §6)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment variables that the project knows. `HF_*` and pip's own are read by those libraries themselves."""

    #: AKV_API_KEY: the key that clients must send; `--api-key` goes before it.
    api_key: str | None = None
    #: AKV_JAX_CACHE_DIR: downloaded models and compiled programs.
    cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "akv-jax")

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """The process's own environment; an empty variable is an unset one."""
        cache_home = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cls(
            api_key=environ.get("AKV_API_KEY") or None,
            cache_dir=Path(environ.get("AKV_JAX_CACHE_DIR") or cache_home / "akv-jax").expanduser(),
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices of the HTTP side alone; the engine has its `EngineConfig`."""

    #: The name that answers and `/v1/models` give; None is the model's own. Requests may name any model: there is one.
    served_model_name: str | None = None
    #: None lets everybody in.
    api_key: str | None = None
    #: Largest request body, bytes; a larger one is answered with 413. None: no limit.
    max_body_size: int | None = None
    log_level: str = "info"
    #: A silent event stream sends a comment this often, so that proxies do not cut it.
    keep_alive_seconds: float = 15.0
    #: How long requests may go on after SIGTERM.
    drain_seconds: float = 10.0
