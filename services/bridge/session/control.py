"""The bridge's HTTP routes besides its probes: POST /v1/source, and GET /v1/wait (`wait_page`).

POST /v1/source: a failover manager with the token sends the bridge to other hosts.

    {"conninfo": "host=a,b port=5432,5433"}   hosts only: everything else is as configured
    200 {"hosts": […], "writable": 1}         this session ends in order, the next is opened there
    400 401 403                               wrong body; no token shown; none configured
    409                                       another database answers there, or an older timeline

It holds until the bridge is started anew. The fences of every session hold there, too; the 409 only
spares the bridge from ending because of a mistake.
"""

from typing import Any

import psycopg
import structlog
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from schemas.errors import SettingsError
from schemas.settings import SourceSettings
from services.bridge.session.runner import Runner
from services.bridge.session.wait_page import wait_page
from services.bridge.source.candidates import writable_servers
from services.bridge.source.hosts import host_name, single_hosts
from services.postgres.server import Server
from services.runtime.access import refusal
from services.runtime.http_server import json_body
from services.runtime.wait_page import PATH as WAIT_PATH

logger = structlog.get_logger(__name__)

SECTION = "bridge"
_HOST_KEYS = ("host", "hostaddr", "port")
_BODY_BYTES_MAX = 8192
_HOSTS_MAX = 32


class Control:
    """The routes of one runner."""

    def __init__(self, runner: Runner, source: SourceSettings, token: bytes) -> None:
        self._runner = runner
        self._source = source
        self._token = token

    def routes(self) -> list[Route]:
        """Return the routes, for services.runtime.process.Probes."""
        return [
            Route("/v1/source", self._move, methods=["POST"]),
            Route(WAIT_PATH, wait_page(self._runner.delivered).answer, methods=["GET"]),
        ]

    async def _move(self, request: Request) -> Response:
        """Answer POST /v1/source: move the bridge to other hosts of its cluster.

        Answer 409 where a server of them has another database, or all have an older timeline.
        """
        refused = refusal(request, self._token, section=SECTION)
        if refused is not None:
            return refused
        try:
            document = await json_body(request, _BODY_BYTES_MAX)
        except ValueError:
            document = None
        try:
            source = source_at(self._source, document)
        except SettingsError as error:
            return _answer(400, error=error.message, hint=error.hint)
        servers = await run_in_threadpool(writable_servers, source)
        wrong = _wrong(servers, self._runner.server)
        if wrong:
            return _answer(409, error=wrong, hint="name the hosts of the bridge's own cluster")
        self._source = source
        self._runner.move(source)
        hosts = [host_name(text) for text in single_hosts(source)]
        logger.info(
            "moving to other hosts, as POST /v1/source asked", hosts=hosts, writable=len(servers)
        )
        return _answer(200, hosts=hosts, writable=len(servers))


def source_at(source: SourceSettings, document: Any) -> SourceSettings:
    """Return the settings with the hosts of a request's document in place of the configured ones.

    Raise SettingsError, which says what is wrong with the document.
    """
    given = document.get("conninfo") if isinstance(document, dict) else None
    if not isinstance(given, str) or set(document) != {"conninfo"}:
        raise _bad("the body is not a JSON document with the one key conninfo")
    try:
        hosts = {key: value for key, value in conninfo_to_dict(given).items() if value}
    except psycopg.ProgrammingError:
        raise _bad("conninfo is not a connection string") from None
    strangers = sorted(set(hosts) - set(_HOST_KEYS))
    if strangers:
        raise _bad(f"{strangers[0]} can't be changed by this request")
    if not hosts.get("host") and not hosts.get("hostaddr"):
        raise _bad("conninfo does not name a host")
    kept = conninfo_to_dict(source.conninfo.get_secret_value())
    merged = {key: value for key, value in kept.items() if key not in _HOST_KEYS} | hosts
    if kept.get("sslmode") != "verify-full":  # a stranger's server would get it
        merged.setdefault("require_auth", "!password")
    moved = source.model_copy(update={"conninfo": SecretStr(make_conninfo("", **merged))})
    if len(single_hosts(moved)) > _HOSTS_MAX:
        raise _bad(f"conninfo names more than {_HOSTS_MAX} hosts")
    return moved


def _wrong(servers: list[Server], followed: Server | None) -> str:
    """Return why the bridge must not go to these servers, "" also where nothing can be said."""
    if followed is None or not servers:
        return ""
    ours = [s for s in servers if s.system_identifier == followed.system_identifier]
    if len(ours) < len(servers):
        return f"the hosts have another database than the bridge's, {followed.system_identifier}"
    newest = max(server.timeline for server in ours)
    if newest < followed.timeline:
        return (
            f"the primary of these hosts is on timeline {newest}, older than the bridge's "
            f"({followed.timeline})"
        )
    return ""


def _bad(message: str) -> SettingsError:
    hint = 'send {"conninfo": "host=a,b port=5432,5433"}: hosts, hostaddr and ports only'
    return SettingsError(message, operation="move the source", hint=hint)


def _answer(status_code: int, **document: Any) -> Response:
    return JSONResponse(document, status_code=status_code)
