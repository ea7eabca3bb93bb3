"""Structured logs on stderr: one line a request, and one for what went wrong."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import FilteringBoundLogger

LEVELS = ("debug", "info", "warning", "error")


def create_logger(level: str, stream: TextIO = sys.stderr) -> FilteringBoundLogger:
    """A logger of its own (nothing process-wide is configured): coloured on a terminal, plain `key=value` elsewhere."""
    return structlog.wrap_logger(
        structlog.WriteLogger(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(
                sort_keys=False,
                colors=stream.isatty(),
                pad_event_to=0,
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        cache_logger_on_first_use=False,
    )
