"""A bar chart as one SVG file: fractions between 0 and 1, in groups."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

_COLOURS = ("#3b6ea5", "#c8793a", "#5b9a5b", "#8a5aa0", "#999999")
_LEFT, _WIDTH, _BAR, _GAP = 280, 460, 14, 12


def chart(title: str, groups: Mapping[str, Mapping[str, float]], note: str = "") -> str:
    """SVG text: a group of bars for each key of `groups`, a bar for each of its fractions, labelled with its number."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    parts = [_text(10, 22, title, size=15), _text(10, 40, note, size=11, fill="#555")]
    for index, name in enumerate(names):
        x = 10 + 190 * index
        parts += [_rectangle(x, 50, 10, colours[name]), _text(x + 16, 60, name)]
    y = top = 76
    for label, bars in groups.items():
        parts.append(_text(10, y + _BAR - 3, label))
        for name, fraction in bars.items():
            length = _WIDTH * min(max(fraction, 0.0), 1.0)
            parts.append(_rectangle(_LEFT, y, length, colours[name], height=_BAR - 2))
            parts.append(_text(_LEFT + length + 5, y + _BAR - 4, f"{100 * fraction:.1f} %"))
            y += _BAR
        y += _GAP
    for tenth in range(0, 11, 2):
        x = _LEFT + _WIDTH * tenth / 10
        parts.append(f'<line x1="{x}" y1="{top - 4}" x2="{x}" y2="{y - _GAP + 4}" stroke="#ddd"/>')
        parts.append(_text(x - 10, y + 8, f"{10 * tenth} %", size=10, fill="#555"))
    size = f'width="{_LEFT + _WIDTH + 70}" height="{y + 18}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
        '<rect width="100%" height="100%" fill="white"/>' + "".join(parts) + "</svg>\n"
    )


def _text(x: float, y: float, text: str, *, size: int = 12, fill: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}">{escape(text)}</text>'


def _rectangle(x: float, y: float, width: float, fill: str, *, height: float = 10) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{fill}"/>'
