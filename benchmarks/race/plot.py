"""Plots as SVG text: bars by group, and lines over a logarithmic axis. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

_COLOURS: Final = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
_LEFT, _TOP, _BAR, _GAP, _WIDTH = 190, 30, 16, 14, 560
_STYLE: Final = 'font-family="sans-serif" font-size="12"'


def bars(groups: Mapping[str, Mapping[str, float]], *, unit: str) -> str:
    """Horizontal bars: group -> label -> value."""
    largest = max((v for group in groups.values() for v in group.values()), default=1.0)
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    parts, y = [], _TOP
    for name, group in groups.items():
        for label, value in group.items():
            colour = _COLOURS[labels.index(label) % len(_COLOURS)]
            width = max(1.0, value / largest * _WIDTH)
            parts.append(_text(_LEFT - 8, y + _BAR - 4, f"{name}  {label}", anchor="end"))
            parts.append(
                f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" '
                f'fill="{colour}"/>'
            )
            parts.append(_text(_LEFT + width + 6, y + _BAR - 4, f"{value:,.0f}"))
            y += _BAR
        y += _GAP
    parts.insert(0, _text(_LEFT, _TOP - 12, unit))
    return _svg(_LEFT + _WIDTH + 90, y + 10, parts)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]], *, x_title: str, y_title: str
) -> str:
    """Points joined by lines, both axes logarithmic: label -> (x, y)."""
    points = [point for of_label in series.values() for point in of_label]
    spans = [_span([point[axis] for point in points]) for axis in (0, 1)]
    height, parts = 320, []

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = (
            (math.log10(value) - low) / (high - low)
            for value, (low, high) in zip(point, spans, strict=True)
        )
        return _LEFT + x * _WIDTH, _TOP + height - y * height

    for axis, (low, high) in enumerate(spans):
        for power in range(math.floor(low), math.ceil(high) + 1):
            for digit in (1, 2, 5):
                value = digit * 10.0**power
                if low <= math.log10(value) <= high:
                    x, y = place(
                        (value, 10 ** spans[1][0]) if axis == 0 else (10 ** spans[0][0], value)
                    )
                    at = (x - 8, y + 16) if axis == 0 else (x - 8, y + 4)
                    parts.append(_text(*at, f"{value:,g}", anchor="end" if axis else "start"))
    for number, (label, of_label) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, of_label))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(_LEFT + 20, _TOP + 16 * number, label, colour=colour))
    parts.append(_text(_LEFT + _WIDTH, _TOP + height + 34, x_title, anchor="end"))
    parts.append(_text(_LEFT, _TOP - 14, y_title))
    return _svg(_LEFT + _WIDTH + 90, _TOP + height + 50, parts)


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    return low, max(high, low + 0.1)


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#333") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" {_STYLE}>'
        f"{escape(text)}</text>"
    )


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
