"""Health checks for load balancers: which node takes writes, which standby may be read from. Pure.

GET, HEAD, OPTIONS    200 when
/primary              exactly one node takes writes
/primary?node=a       node a is that one
/replica              a standby streams from the primary
/replica?node=b       standby b does
  &lag=16MB           and lacks no more than that of the primary's WAL (bytes, kB, MB, GB)

Else 503, also while the last observation is old: what is not known is not a pass. 404: the settings
have no node of that name. 400: `lag` is not an amount. HAProxy asks for each of its servers:

    option httpchk
    http-check send meth GET uri-lf /primary?node=%[srv_name]
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from services.failover.model.topology import follows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.failover.model.view import Node, View

_AMOUNT: Final = re.compile(r"(\d{1,15}) ?(b|kb|mb|gb|)", re.IGNORECASE)
_UNITS: Final = {"": 1, "b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30}
Answer = tuple[int, dict[str, Any]]


def primary_health(view: View | None, query: Mapping[str, str]) -> Answer:
    """Answer /primary by the last view; `view` None: no recent observation."""
    if view is None:
        return 503, {"problem": "the last observation is old, or there is none"}
    name = query.get("node")
    if name is not None and all(node.name != name for node in view.nodes):
        return 404, {"problem": f"there is no node {name[:100]!r} in the settings"}
    if len(view.writable) != 1:
        return 503, {"problem": f"{len(view.writable)} nodes take writes"}
    (primary,) = view.writable
    return 200 if name in (None, primary.name) else 503, _described(primary, view)


def replica_health(view: View | None, query: Mapping[str, str]) -> Answer:
    """Answer /replica by the last view; `view` None: no recent observation."""
    if view is None:
        return 503, {"problem": "the last observation is old, or there is none"}
    lag_max = _bytes(query["lag"]) if "lag" in query else None
    if "lag" in query and lag_max is None:
        return 400, {"problem": "lag is an amount of bytes such as 1048576 or 16MB"}
    name = query.get("node")
    wanted = [node for node in view.nodes if name in (None, node.name)]
    if not wanted:
        return 404, {"problem": f"there is no node {str(name)[:100]!r} in the settings"}
    good = [node for node in wanted if _readable(node, view, lag_max)]
    if not good:
        problem = "no standby streams from the primary, or lacks too much of its WAL"
        return 503, {"problem": problem, "nodes": [_described(node, view) for node in wanted]}
    return 200, {"nodes": [_described(node, view) for node in good]}


def _readable(node: Node, view: View, lag_max: int | None) -> bool:
    """Tell whether a standby streams from the one primary and lacks at most `lag_max` bytes."""
    if node.state is None or not node.standby or len(view.writable) != 1:
        return False
    streams = node.state.replication.receiver_streaming and follows(node, view.writable[0])
    lag = _lag(node, view)
    return streams and lag is not None and (lag_max is None or lag <= lag_max)


def _lag(node: Node, view: View) -> int | None:
    """Return how many bytes of the primary's WAL the node has not replayed, None if unknown."""
    primary = view.writable[0] if len(view.writable) == 1 else None
    if node.state is None or primary is None or primary.state is None:
        return None
    written, replayed = primary.state.replication.written_lsn, node.state.replication.replayed_lsn
    if written is None or (replayed is None and node.standby):
        return None
    return max(0, written - (replayed or written))


def _described(node: Node, view: View) -> dict[str, Any]:
    role = "primary" if node.writable else "standby" if node.standby else str(node.reach)
    timeline = node.state.server.timeline if node.state is not None else None
    return {"node": node.name, "role": role, "timeline": timeline, "lag_bytes": _lag(node, view)}


def _bytes(text: str) -> int | None:
    found = _AMOUNT.fullmatch(text.strip())
    return int(found[1]) * _UNITS[found[2].lower()] if found is not None else None
