"""DESIGN A6 by definition where a reposition makes copies: a token that is read where some version already is counts as
cached, not as rotated."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from spec.operations import History
from spec.state import run
from spec.visibility import NO_WINDOW, Usage, reads_in_any_layer, usage


def copy_usage(
    history: History, versions: Collection[tuple[int, int]], windows: Sequence[int | None] = NO_WINDOW
) -> Usage:
    """As `spec.visibility.usage`; `versions`: (logical index, position) of what is at hand when the request begins."""
    plain = usage(history, {index for index, _ in versions}, windows)
    queries = run(None, history).queries
    reads = {(read.index, read.position) for i in plain.computed for read in reads_in_any_layer(queries[i], windows)}
    rotated = {index for index, position in reads if (index, position) not in versions}
    others = plain.repos | plain.cached
    return Usage(plain.computed, plain.drop_skipped, others & rotated, others - rotated)
