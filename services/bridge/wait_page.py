"""GET /v1/wait of the bridge: read your writes in Kafka (`slotbridge.consumer.wait_for`).

    200 {"lsn", "in", "delivered", "timeline"}  Kafka has all that was committed before the lsn
    400 {"error"}                               wrong query, which the error names
    409 {"error"}                               `timeline` was left before the lsn: lost, for good
    503 {"error"}                               WAITERS_MAX requests wait already
    504 {"error"}                               Kafka does not have it within the time-out

Needs no token: it tells a position, and a request costs a timer.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from schemas.lsn import format_lsn
from schemas.wait import TOO_MANY, WAITERS_MAX, WaitQuery, lost, parse_wait
from services.bridge.runner import Delivered

_LOOK_S: Final = 0.005
_LOOK_LATER_S: Final = 0.05
_SOON_S: Final = 0.5
"""How often a request looks: at first, for `_SOON_S`, and later."""
_GONE_EVERY: Final = 20
"""Looks between two questions whether the client is still there."""
CLIENT_GONE: Final = 499
"""The status of an answer that nobody reads."""


class WaitPage:
    """The page of a bridge, whose state `delivered` tells."""

    def __init__(self, delivered: Callable[[], Delivered | None]) -> None:
        self._delivered = delivered
        self.waiters = 0
        """How many requests wait now."""

    async def answer(self, request: Request) -> Response:
        """Answer once Kafka has what was committed before the position, or why it has not."""
        try:
            query = parse_wait(request.query_params, "kafka")
        except ValueError as error:
            return _answer(400, error=str(error))
        if self.waiters >= WAITERS_MAX:
            return _answer(503, error=TOO_MANY)
        self.waiters += 1
        try:
            return await self._wait(request, query)
        finally:
            self.waiters -= 1

    async def _wait(self, request: Request, query: WaitQuery) -> Response:
        began = time.monotonic()
        looks = 0
        while True:
            found = self._delivered()
            answer = None if found is None else _answered(query, found)
            if answer is not None:
                return answer
            waited_s = time.monotonic() - began
            if waited_s >= query.timeout_s:
                return _answer(504, error=_late(query, found))
            looks += 1
            if looks % _GONE_EVERY == 0 and await request.is_disconnected():
                return Response(status_code=CLIENT_GONE)
            pause_s = _LOOK_S if waited_s < _SOON_S else _LOOK_LATER_S
            await asyncio.sleep(min(pause_s, query.timeout_s - waited_s))


def _answered(query: WaitQuery, found: Delivered) -> Response | None:
    """Return the answer that the bridge's present state allows, None for none yet."""
    why = lost(query, found.timeline, found.history)
    if why:
        return _answer(409, error=why)
    if found.lsn < query.lsn or found.timeline < (query.timeline or 0):
        return None
    told = {"lsn": format_lsn(query.lsn), "delivered": format_lsn(found.lsn)}
    return _answer(200, **told, **{"in": "kafka"}, timeline=found.timeline)


def _late(query: WaitQuery, found: Delivered | None) -> str:
    where = "nothing streams"
    if found is not None:
        where = f"at {format_lsn(found.lsn)} of timeline {found.timeline}"
    wanted = f" of timeline {query.timeline}" if query.timeline is not None else ""
    return f"Kafka does not have {format_lsn(query.lsn)}{wanted} yet: {where}"


def _answer(status_code: int, **document: Any) -> Response:
    return JSONResponse(document, status_code=status_code)
