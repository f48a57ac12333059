"""The answers of the bridge's GET /v1/wait (services.runtime.wait_page).

200 {"lsn", "in", "delivered", "timeline"}  Kafka has all that was committed before the lsn
"""

from collections.abc import Callable

from schemas.lsn import format_lsn
from schemas.wait import WaitQuery, lost
from services.bridge.session.runner import Delivered
from services.runtime.wait_page import Answer, WaitPage


def wait_page(delivered: Callable[[], Delivered | None]) -> WaitPage:
    """Return the page of a bridge, whose state `delivered` tells."""
    return WaitPage(
        "kafka",
        lambda query: lambda: _answered(query, delivered()),
        lambda query: _late(query, delivered()),
    )


def _answered(query: WaitQuery, delivered: Delivered | None) -> Answer | None:
    """Return the answer that the bridge's present state allows, None for none yet."""
    if delivered is None:
        return None
    why = lost(query, delivered.timeline, delivered.history)
    if why:
        return 409, {"error": why}
    if delivered.lsn < query.lsn or delivered.timeline < (query.timeline or 0):
        return None
    positions = {"lsn": format_lsn(query.lsn), "delivered": format_lsn(delivered.lsn)}
    return 200, {**positions, "in": "kafka", "timeline": delivered.timeline}


def _late(query: WaitQuery, delivered: Delivered | None) -> str:
    where = "nothing streams"
    if delivered is not None:
        where = f"at {format_lsn(delivered.lsn)} of timeline {delivered.timeline}"
    wanted = f" of timeline {query.timeline}" if query.timeline is not None else ""
    return f"Kafka does not have {format_lsn(query.lsn)}{wanted} yet: {where}"
