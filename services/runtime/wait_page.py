"""GET /v1/wait, which the bridge and `slottables run` answer (`slotbridge.consumer.wait_for`).

    200 {"lsn", "in", …}  what was committed before the lsn is there
    400 {"error"}         wrong query, which the error names
    409 {"error"}         `timeline` was left before the lsn: lost, for good
    503 {"error"}         WAITERS_MAX requests wait already
    504 {"error"}         it is not there within the time-out

Needs no token: it tells a position, and a request costs a timer.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from schemas.wait import TOO_MANY, WAITERS_MAX, WaitQuery, Where, parse_wait

_LOOK_S: Final = 0.005
_LOOK_LATER_S: Final = 0.05
_SOON_S: Final = 0.5
"""How often a request looks: at first, for `_SOON_S`, and later."""
_GONE_EVERY: Final = 20
"""Looks between two questions whether the client is still there."""
CLIENT_GONE: Final = 499
"""The status of an answer that nobody reads."""
PATH: Final = "/v1/wait"

Answer = tuple[int, dict[str, Any]]
Look = Callable[[], Answer | None]


class WaitPage:
    """The page of one program.

    `look_for` returns, for a query, what gives the answer that the present state allows, None
    for none yet; `late` says why there was none.
    """

    def __init__(
        self, where: Where, look_for: Callable[[WaitQuery], Look], late: Callable[[WaitQuery], str]
    ) -> None:
        self._where: Where = where
        self._look_for = look_for
        self._late = late
        self.waiters = 0
        """How many requests wait now."""

    async def answer(self, request: Request) -> Response:
        """Answer once what was committed before the position is there, or why it is not."""
        try:
            query = parse_wait(request.query_params, self._where)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        if self.waiters >= WAITERS_MAX:
            return JSONResponse({"error": TOO_MANY}, 503)
        self.waiters += 1
        try:
            return await self._wait(request, query)
        finally:
            self.waiters -= 1

    async def _wait(self, request: Request, query: WaitQuery) -> Response:
        """Answer once the changes are there; with 504 at the timeout."""
        began = time.monotonic()
        looks, look = 0, self._look_for(query)
        while True:
            answer = look()
            if answer is not None:
                return JSONResponse(answer[1], answer[0])
            waited_s = time.monotonic() - began
            if waited_s >= query.timeout_s:
                return JSONResponse({"error": self._late(query)}, 504)
            looks += 1
            if looks % _GONE_EVERY == 0 and await request.is_disconnected():
                return Response(status_code=CLIENT_GONE)
            pause_s = _LOOK_S if waited_s < _SOON_S else _LOOK_LATER_S
            await asyncio.sleep(min(pause_s, query.timeout_s - waited_s))
