"""The HTTP routes of `watch`: the page, /v1/…, and two orders that need the token.

GET  /                the page
GET  /v1/status       what was seen last and what is decided
GET  /v1/checks       every finding of `slotfailover check`
GET  /v1/plan         what `slotfailover plan` would print
GET  /v1/history      the journal's last entries
GET  /primary         for load balancers (web.health); also HEAD and OPTIONS, from any host
GET  /replica
POST /v1/pause        {"reason": "…"}, optional: watch goes on looking, and acts no more
POST /v1/resume
"""

import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from schemas.settings import WatchSettings
from services.failover.execute.history import history_as_json
from services.failover.model.view import View
from services.failover.plan.request import Request as PlanRequest
from services.failover.watch.loop import Watch
from services.failover.watch.web.health import Answer as Health
from services.failover.watch.web.health import primary_health, replica_health
from services.failover.watch.web.page import page
from services.failover.watch.web.status import plan_of, status_of
from services.runtime.access import refusal
from services.runtime.http_server import json_body

SECTION = "failover.watch"
_BODY_BYTES_MAX = 4096
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_OF_BALANCERS = ("GET", "HEAD", "OPTIONS")
Answer = Callable[[Request], Awaitable[Response]]


class Api:
    """The routes of one replica."""

    def __init__(
        self, watch: Watch, plan_request: PlanRequest, token: bytes, settings: WatchSettings
    ) -> None:
        refresh_s = settings.interval_ms / 1000
        self._hosts = {name.lower() for name in (*settings.allowed_hosts, settings.http_host)}
        self._token_to_read = settings.token_to_read
        self._watch = watch
        self._plan_request = plan_request
        self._token = token
        self._refresh_s = refresh_s
        self._files = {name: _read(name) for name in ("page.css", "page.js")}

    def routes(self) -> list[Route]:
        """Return the routes, for services.runtime.process.Probes."""
        orders = {"/v1/pause": self._order(paused=True), "/v1/resume": self._order(paused=False)}
        return [
            Route("/", self._guarded(self._page)),
            Route("/page.css", self._guarded(self._file("page.css", "text/css"))),
            Route("/page.js", self._guarded(self._file("page.js", "text/javascript"))),
            Route("/v1/status", self._guarded(self._status)),
            Route("/v1/checks", self._guarded(self._checks)),
            Route("/v1/plan", self._guarded(self._plan)),
            Route("/v1/history", self._guarded(self._history)),
            *(Route(p, self._guarded(a), methods=["POST"]) for p, a in orders.items()),
            Route("/primary", self._health(primary_health), methods=_OF_BALANCERS),
            Route("/replica", self._health(replica_health), methods=_OF_BALANCERS),
        ]

    def _guarded(self, answer: Answer) -> Answer:
        """Return a handler that answers only requests for our host names, by those who may read."""

        async def guarded(request: Request) -> Response:
            name = _host_of(request)
            if not _is_address(name) and name not in self._hosts | {"localhost"}:
                text = f"{name or 'no host'} is not one of {SECTION}.allowed_hosts"
                return _json({"error": text}, 421)
            if self._token_to_read:
                refused = refusal(request, self._token, section=SECTION, basic=True)
                if refused is not None:
                    return refused
            return await answer(request)

        return guarded

    async def _page(self, _request: Request) -> Response:
        text = page(self._watch.snapshot, self._refresh_s)
        return Response(text, media_type="text/html", headers=_HEADERS)

    def _file(self, name: str, media_type: str) -> Answer:
        async def answer(_request: Request) -> Response:
            return Response(self._files[name], media_type=media_type, headers=_HEADERS)

        return answer

    async def _status(self, _request: Request) -> Response:
        return _json(status_of(self._watch.snapshot))

    async def _checks(self, _request: Request) -> Response:
        snapshot = self._watch.snapshot
        if snapshot.checkup is None:
            return _json({"problem": snapshot.problem or "nothing was observed yet"}, 503)
        return _json(snapshot.checkup.as_json())

    def _health(self, judge: Callable[[View | None, Mapping[str, str]], Health]) -> Answer:
        """Answer a load balancer, which shows no token and often no host name, as /metrics does."""

        async def answer(request: Request) -> Response:
            status_code, document = judge(self._watch.fresh_view, request.query_params)
            return _json(document, status_code)

        return answer

    async def _plan(self, _request: Request) -> Response:
        snapshot = self._watch.snapshot
        if snapshot.view is None:
            return _json({"problem": snapshot.problem or "nothing was observed yet"}, 503)
        return _json(plan_of(snapshot.view, self._plan_request))

    async def _history(self, _request: Request) -> Response:
        return _json(history_as_json(self._watch.snapshot.entries))

    def _order(self, *, paused: bool) -> Answer:
        """Return the handler that pauses or resumes, with the reason in the body."""

        async def answer(request: Request) -> Response:
            refused = refusal(request, self._token, section=SECTION)
            if refused is not None:
                return refused
            reason = await _reason(request)
            if reason is None:
                text = 'the body is {"reason": "…"}, or empty'
                return _json({"error": text}, 400)
            host = request.client.host if request.client is not None else "?"
            by = f"{host}: {reason}" if reason else host
            done = await run_in_threadpool(self._watch.order, paused=paused, by=by, reason=reason)
            return _json(done.as_json(), done.status_code)

        return answer


def _host_of(request: Request) -> str:
    """Return the name by which the request asks for us, without its port.

    A page of another site can have a browser ask us by a name of that site (DNS rebinding).
    """
    host = request.headers.get("host", "").strip().lower()
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).strip("[]")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _reason(request: Request) -> str | None:
    """Return the reason that the request's body gives, None if the body is something else."""
    try:
        document = await json_body(request, _BODY_BYTES_MAX)
    except ValueError:
        return None
    reason = document.get("reason", "") if isinstance(document, dict) else None
    return reason if isinstance(reason, str) and set(document) <= {"reason"} else None


def _json(document: dict[str, Any], status_code: int = 200) -> Response:
    return JSONResponse(document, status_code=status_code, headers=_HEADERS)


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
