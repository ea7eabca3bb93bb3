"""Structured logs on stderr: one line a request (`request_log.py`), with the traceback where we failed."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog
from structlog.typing import FilteringBoundLogger


def create_logger(level: str, stream: TextIO | None = None) -> FilteringBoundLogger:
    """A logger of its own, on stderr by default: coloured on a terminal, plain `key=value` elsewhere."""
    out: TextIO = stream or sys.stderr
    return structlog.wrap_logger(structlog.WriteLogger(out), cache_logger_on_first_use=False, **_style(level, out))


def configure_process(level: str) -> None:
    """The same look for modules that ask structlog for a logger. For the program's entry point alone."""
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(sys.stderr), **_style(level, sys.stderr))


def _style(level: str, stream: TextIO) -> dict[str, Any]:
    console = structlog.dev.ConsoleRenderer(
        colors=stream.isatty(),
        pad_event_to=0,
        sort_keys=False,
        exception_formatter=structlog.dev.plain_traceback,
    )
    stamp = structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False)
    return {
        "processors": [structlog.processors.add_log_level, stamp, console],
        "wrapper_class": structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
    }
