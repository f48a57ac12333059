"""Lag over time as inline SVG: one line for each standby and consumer, with a legend. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from services.failover.watch.web.markup import el

if TYPE_CHECKING:
    from collections.abc import Sequence
    from xml.etree.ElementTree import Element

    from services.failover.watch.snapshot import Point

SERIES_MAX = 6
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 340, 170, 54, 18, 8
_BYTES_MIN = 1024
_POINTS_DRAWN_MAX = 240
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def curves(points: Sequence[Point]) -> Element:
    """Draw the lags and a legend; return a sentence while there is nothing to draw."""
    drawn = _thinned(points)
    names = _names(drawn)
    if len(drawn) < 2 or not names:
        return el("p", "Nothing to draw yet.", class_="quiet")
    shown = names[:SERIES_MAX]
    highest = max(_BYTES_MIN, *(p.lags.get(name, 0) for p in drawn for name in shown))
    ceiling = _nice(highest)
    lines = [
        el("polyline", points=line, class_=f"curve c{number}")
        for number, name in enumerate(shown)
        for line in _lines(drawn, name, ceiling)
    ]
    last = drawn[-1].lags
    legend = [_entry(number, name, last.get(name)) for number, name in enumerate(shown)]
    if len(names) > SERIES_MAX:
        legend.append(el("li", f"and {len(names) - SERIES_MAX} more in /v1/status"))
    said = "; ".join(f"{name} {bytes_text(last.get(name))}" for name in shown)
    return el(
        "div",
        el(
            "svg",
            el("title", f"lag now: {said}"),
            *_axes(drawn, ceiling),
            *lines,
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            class_="curves",
            role="img",
        ),
        el("ul", *legend, class_="legend"),
    )


def bytes_text(number: int | None) -> str:
    """Return a size for people: 1536 -> 1.5 kB; None -> a question mark."""
    if number is None:
        return "?"
    size, unit = float(number), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 or size >= 10 else f"{size:.1f} {_UNITS[unit]}"


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most as many points as can be seen: of each group the one with the greatest lag."""
    size = -(-len(points) // _POINTS_DRAWN_MAX) or 1
    groups = [points[n : n + size] for n in range(0, len(points), size)]
    return [max(group, key=lambda p: max(p.lags.values(), default=0)) for group in groups]


def _names(points: Sequence[Point]) -> list[str]:
    """Return the names of all times, those with the most lag first where not all can be drawn."""
    names = dict.fromkeys(name for point in points for name in point.lags)
    if len(names) <= SERIES_MAX:
        return sorted(names)
    return sorted(names, key=lambda name: (-max(p.lags.get(name, 0) for p in points), name))


def _lines(points: Sequence[Point], name: str, ceiling: int) -> list[str]:
    """Return the unbroken parts of a line, as SVG's points."""
    first, span = points[0].at, max(points[-1].at - points[0].at, 1e-9)
    wide, high = _WIDTH - _LEFT - 4, _HEIGHT - _TOP - _BOTTOM
    parts: list[list[str]] = [[]]
    for point in points:
        if name not in point.lags:
            parts.append([])
            continue
        x = _LEFT + wide * (point.at - first) / span
        y = _TOP + high * (1 - point.lags[name] / ceiling)
        parts[-1].append(f"{x:.1f},{y:.1f}")
    return [" ".join(part) for part in parts if len(part) > 1]


def _axes(points: Sequence[Point], ceiling: int) -> list[Element]:
    """Return the chart's lines, their sizes, and the first and last time."""
    high = _HEIGHT - _TOP - _BOTTOM
    axes = []
    for part in (0.0, 0.5, 1.0):
        y = _TOP + high * (1 - part)
        axes += [
            el("path", d=f"M{_LEFT} {y:.1f} H{_WIDTH - 4}", class_="grid"),
            el("text", bytes_text(int(ceiling * part)), x=_LEFT - 6, y=f"{y + 4:.1f}", class_="y"),
        ]
    for point, x, anchor in ((points[0], _LEFT, "start"), (points[-1], _WIDTH - 4, "end")):
        at = datetime.fromtimestamp(point.at, UTC).strftime("%H:%M:%S")
        axes.append(el("text", at, x=x, y=_HEIGHT - 4, text_anchor=anchor, class_="x"))
    return axes


def _entry(number: int, name: str, lag: int | None) -> Element:
    """Return a server's item in the chart's legend: colour, name, present lag."""
    swatch = el(
        "svg",
        el("path", d="M0 5 H22", class_=f"curve c{number}"),
        viewBox="0 0 22 10",
        class_="swatch",
    )
    swatch.set("aria-hidden", "true")
    return el("li", swatch, f" {name} ", el("b", bytes_text(lag)))


def _nice(number: int) -> int:
    """Round a number of bytes up to the next of _BYTES_MIN's doublings."""
    size = _BYTES_MIN
    while size < number:
        size *= 2
    return size
