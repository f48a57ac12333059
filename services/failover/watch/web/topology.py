"""The picture of who gets WAL from whom: a tree of boxes, as inline SVG. Pure.

    a   primary, timeline 2 · 0/3000060
    ├── b   standby, streams · 0/3000060
    └── sub/s1   slot s1 · 0/3000028

It is drawn as narrow as a telephone is, so that it can be read there without being scaled down.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from schemas.lsn import format_lsn
from services.failover.checks.facts import bridge_position
from services.failover.model.topology import follows
from services.failover.watch.snapshot import position_of, role_of
from services.failover.watch.web.markup import el

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from services.failover.model.subscription import Subscription
    from services.failover.model.view import Node, Subscriber, View

_WIDTH, _ROW, _BOX, _INDENT, _MARGIN = 340, 54, 44, 24, 2
_TITLE_MAX, _LINE_MAX = 34, 46


@dataclass(frozen=True, slots=True)
class Box:
    """A server or consumer; `parent` is the index of the box that feeds it, None for none."""

    title: str
    line: str
    kind: str
    """good, warn, bad or idle: a class of the style sheet."""
    depth: int
    parent: int | None
    linked: bool = True
    """WAL flows now."""


def topology(view: View) -> Element:
    """Return the picture of nodes, subscribers and connections."""
    boxes = boxes_of(view)
    height = len(boxes) * _ROW
    drawn = [part for number, box in enumerate(boxes) for part in _drawn(number, box, boxes)]
    said = "; ".join(f"{box.title}: {box.line}" for box in boxes)
    return el(
        "svg",
        el("title", said),
        *drawn,
        viewBox=f"0 0 {_WIDTH} {height}",
        class_="topology",
        role="img",
    )


def boxes_of(view: View) -> list[Box]:
    """Return a box for every node and consumer, below what feeds it; the others at the left."""
    boxes: list[Box] = []
    placed: set[str] = set()
    numbers = count()

    def place(node: Node, depth: int, parent: int | None) -> None:
        placed.add(node.name)
        number = next(numbers)
        boxes.append(_of_node(view, node, depth, parent))
        for other in view.nodes:
            if other.name not in placed and other.state is not None and _above(view, other) is node:
                place(other, depth + 1, number)
        for subscriber, found in (*view.ours(), *view.fed_by_standbys()):
            if found.conninfo.names(node.endpoints) and node is _feeder(view, found):
                next(numbers)
                boxes.append(_of_subscription(subscriber, found, depth + 1, number))
        if view.bridge_slot is not None and node is view.primary:
            next(numbers)
            boxes.append(_of_bridge(view, node, view.bridge_slot, depth + 1, number))

    for node in sorted(view.nodes, key=lambda node: not node.leading):
        if node.name not in placed and _above(view, node) is None:
            place(node, 0, None)
    for node in view.nodes:
        if node.name not in placed:  # standbys of one another
            place(node, 0, None)
    for subscriber in view.subscribers:
        if not subscriber.usable:
            line = subscriber.detail or "it is a standby"
            boxes.append(Box(subscriber.name, line, "bad", 0, None))
    for subscriber, found in view.ours():
        if _feeder(view, found) is None:
            boxes.append(_of_subscription(subscriber, found, 0, None))
    return boxes


def _above(view: View, node: Node) -> Node | None:
    """Return the node that a standby gets its WAL from, None where the settings don't know it."""
    if node.state is None or not node.standby or node.state.upstream is None:
        return None
    return next((o for o in view.nodes if o is not node and follows(node, o)), None)


def _feeder(view: View, subscription: Subscription) -> Node | None:
    """Return the node that a subscription leads to; of several, the primary."""
    named = [node for node in view.nodes if subscription.conninfo.names(node.endpoints)]
    return next((n for n in named if n is view.primary), named[0] if named else None)


def _of_node(view: View, node: Node, depth: int, parent: int | None) -> Box:
    """Return a node's box: role, position, timeline and address."""
    if node.state is None:
        return Box(f"{node.name} · {node.reach}", node.detail, "bad", depth, parent, linked=False)
    position = position_of(node)
    lsn = format_lsn(position) if position is not None else "?"
    streams = node.state.replication.receiver_streaming
    state = "" if node.leading else ", streams" if streams else ", does not stream"
    well = node is view.primary and node.writable if node.leading else streams
    title = f"{node.name} · {role_of(node)}{state}"
    line = f"{lsn} · timeline {node.state.server.timeline} · {node.address}"
    return Box(title, line, "good" if well else "bad", depth, parent, linked=streams)


def _of_subscription(
    where: Subscriber, subscription: Subscription, depth: int, parent: int | None
) -> Box:
    """Return a subscription's box: whether it is connected, its position and slot."""
    lsn = (
        format_lsn(subscription.remote_lsn)
        if subscription.remote_lsn is not None
        else "no position"
    )
    state = (
        "connected" if subscription.fed else "not connected" if subscription.enabled else "disabled"
    )
    kind = "good" if subscription.fed else "warn"
    line = f"{state} · {lsn} · slot {subscription.slot_name or 'none'}"
    return Box(
        f"{where.name}/{subscription.name}", line, kind, depth, parent, linked=subscription.fed
    )


def _of_bridge(view: View, node: Node, slot: str, depth: int, parent: int) -> Box:
    """Return the box of the bridge, fed by this node."""
    found = node.state.slot(slot) if node.state is not None else None
    there = found is not None and found.active_pid is not None
    position = bridge_position(view)
    lsn = format_lsn(position) if position is not None else "no position"
    state = "connected" if there else "not connected"
    kind = "good" if there else "warn"
    line = f"{state} · {lsn} · slot {slot}"
    return Box("bridge", line, kind, depth, parent, linked=there)


def _drawn(number: int, box: Box, boxes: list[Box]) -> list[Element]:
    """Return a box as SVG, with the line from the box above it."""
    x, y = _MARGIN + box.depth * _INDENT, number * _ROW + 4
    parts = []
    if box.parent is not None:
        above = boxes[box.parent]
        stem = _MARGIN + above.depth * _INDENT + 11
        top = box.parent * _ROW + 4 + _BOX
        middle = y + _BOX // 2
        path = f"M{stem} {top} V{middle} H{x - 6}"
        parts.append(el("path", d=path, class_="flow" if box.linked else "flow cut"))
        tip = f"M{x} {middle} l-7 -4 v8 z"
        parts.append(el("path", d=tip, class_="tip" if box.linked else "tip cut"))
    width = _WIDTH - x - _MARGIN
    shrink = box.depth * 3
    parts += [
        el("rect", x=x, y=y, width=width, height=_BOX, rx=7, class_=f"box {box.kind}"),
        el("circle", cx=x + 14, cy=y + 15, r=4, class_=f"dot {box.kind}"),
        el("text", _cut(box.title, _TITLE_MAX - shrink), x=x + 24, y=y + 19, class_="name"),
        el("text", _cut(box.line, _LINE_MAX - shrink), x=x + 11, y=y + 36, class_="line"),
    ]
    return [el("g", el("title", f"{box.title}: {box.line}"), *parts)]


def _cut(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"
