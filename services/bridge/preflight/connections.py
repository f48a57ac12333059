"""Connects to what the settings name, but Kafka: servers, registry, storage, catalog, nodes.

Each answer is a finding. Nothing is made or changed anywhere.
"""

import contextlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psycopg
from pydantic import SecretStr

from schemas.errors import SlotbridgeError
from schemas.findings import Finding, Severity
from schemas.settings import Settings, SourceSettings
from schemas.tables import TablesSettings
from services.bridge.preflight.finding import advice, contact, not_judged, start_refusal
from services.bridge.sink.object_storage import object_storage
from services.bridge.source.candidates import Candidate, connect
from services.bridge.source.hosts import host_name, single_hosts
from services.bridge.source.replication_connection import ReplicationConnection
from services.bridge.source.server_errors import connect_error
from services.bridge.source.server_requirements import check_server
from services.kafka.schema_registry import SchemaRegistry
from services.postgres.sessions import STATUS, open_session

_NAME: Final = "slotbridge preflight"
_CONNECT_S: Final = 5
_DENIED: Final = (401, 403)


def connections(settings: Settings, source: SourceSettings) -> Iterator[Finding]:
    """Yield what answers, what does not, and what is not judged."""
    yield from hosts(settings, source)
    yield from _nodes(settings)
    if settings.registry is not None:
        registry = SchemaRegistry(settings.registry)
        with contextlib.closing(registry):
            subject = f"the schema registry {settings.registry.url}"
            yield from _tried("registry-refuses", subject, registry.require)
    if settings.claim_check is not None:
        with contextlib.closing(object_storage(settings.claim_check)) as storage:
            subject = f"the object storage {settings.claim_check.uri}"
            yield from _tried("storage-refuses", subject, storage.identify)
        yield not_judged(subject, "whether it takes an object: a start stores an empty one")
    if settings.tables is not None:
        yield from _catalog(settings.tables)
    if settings.tracing.enabled:
        yield not_judged("tracing", "whether anybody takes the traces: nothing waits for that")


def hosts(settings: Settings, source: SourceSettings) -> Iterator[Finding]:
    """Yield for each host whether the bridge's role gets the two sessions that it needs there."""
    reached = {host_name(one): (one, connect(one)) for one in single_hosts(source)}
    found = [one for _, one in reached.values() if isinstance(one, Candidate)]
    writable = any(not one.read_only for one in found)
    for name, (conninfo, candidate) in reached.items():
        if isinstance(candidate, SlotbridgeError):
            yield _of_host(candidate, name, needed=not writable)
            continue
        candidate.connection.close()
        server = candidate.server
        role = "standby" if server.in_recovery else "primary"
        try:
            check_server(server, two_phase=source.two_phase)
            with contextlib.closing(
                ReplicationConnection(
                    conninfo,
                    source.slot,
                    wal_sender_timeout_ms=settings.bridge.wal_sender_timeout_ms,
                    sql_deadline_ms=settings.bridge.sql_deadline_ms,
                    name=_NAME,
                )
            ) as connection:
                connection.identify()
        except SlotbridgeError as error:
            yield _of_host(error, f"{role} {name}", needed=not candidate.read_only)
        else:
            version = f"{server.version // 10000}.{server.version % 10000}"
            yield contact(f"{role} {name}", f"PostgreSQL {version}: SQL and replication")


def _of_host(error: SlotbridgeError, name: str, *, needed: bool) -> Finding:
    """Return the finding of a host that refuses a session; `needed`: a start needs this one."""
    if needed:
        return start_refusal("host-refuses", error, name)
    return advice(
        "host-refuses",
        Severity.WARNING,
        name,
        error.message,
        "after a failover to this server, the bridge does not get on",
        error.hint,
    )


def _tried(check: str, subject: str, ask: Callable[[], object]) -> Iterator[Finding]:
    try:
        ask()
    except SlotbridgeError as error:
        yield start_refusal(check, error, subject)
    else:
        yield contact(subject)


def _nodes(settings: Settings) -> Iterator[Finding]:
    """Yield whether slotfailover's nodes answer; `slotfailover check` judges them."""
    failover = settings.failover
    if failover is None:
        return
    for section, named in (
        ("nodes", failover.nodes),
        ("admins", failover.admins),
        ("subscribers", failover.subscribers),
    ):
        for name, conninfo in named.items():
            setting = f"failover.{section}.{name}"
            yield _node(setting, conninfo, failover.connect_timeout_s, admin=section == "admins")
    yield not_judged("a failover", "slotfailover check --config FILE says what it would lose")


def _node(setting: str, conninfo: SecretStr, timeout_s: int, *, admin: bool) -> Finding:
    """Return whether slotfailover can connect to a server, for `admin` as a superuser."""
    text = conninfo.get_secret_value()
    try:
        with open_session(STATUS, text, connect_timeout=timeout_s) as connection:
            superuser = connection.info.parameter_status("is_superuser") == "on"
    except psycopg.Error as error:
        explained = connect_error(error, setting, setting)
        message, change = explained.message, explained.hint
    else:
        if superuser or not admin:
            return contact(setting)
        message = f"the role {connection.info.user} is not a superuser"
        change = f"name a superuser in {setting}"
    lost = "slotfailover can't use this server"
    return advice("node-refuses", Severity.WARNING, setting, message, lost, change)


def _catalog(tables: TablesSettings) -> Iterator[Finding]:
    """Yield whether the catalog and the warehouse of the Iceberg tables answer."""
    subject = f"the catalog {urlsplit(tables.catalog_uri).hostname or tables.catalog_type}"
    if tables.catalog_uri.removeprefix("jdbc:").startswith("postgresql:"):
        yield from _jdbc(tables, subject)
    elif tables.catalog_type == "rest":
        yield from _rest(tables, subject)
    elif tables.catalog_uri or tables.catalog_type != "jdbc":
        yield not_judged(subject, f"only Spark can ask a catalog of type {tables.catalog_type}")
    if "://" in tables.warehouse:
        yield not_judged(f"the warehouse {tables.warehouse}", "only Spark can ask it")
    else:
        yield from _folder(Path(tables.warehouse))
    if not {"spark.jars", "spark.jars.packages"} & tables.spark_options.keys():
        yield not_judged("Spark's jars", "tables.spark_options does not name them")


def _folder(warehouse: Path) -> Iterator[Finding]:
    """Yield whether the warehouse's folder, or the nearest one above it, can be written to."""
    nearest = next(one for one in (warehouse, *warehouse.parents) if one.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        yield contact(f"the warehouse {warehouse}")
    else:
        yield advice(
            "warehouse-refuses",
            Severity.CRITICAL,
            f"the warehouse {warehouse}",
            f"{nearest} can't be written to by this user",
            "slottables run ends with exit code 20",
            "run slottables as a user that may write there, or name another tables.warehouse",
        )


def _jdbc(tables: TablesSettings, subject: str) -> Iterator[Finding]:
    """Try the catalog's database as Spark's driver would, but with libpq."""
    options, where = tables.catalog_options, tables.catalog_uri.removeprefix("jdbc:")
    given: dict[str, Any] = {
        key: options[f"jdbc.{name}"]
        for key, name in (("user", "user"), ("password", "password"))
        if f"jdbc.{name}" in options
    }
    address = where.partition("?")[0]  # the driver's parameters are not libpq's
    try:
        with open_session(STATUS, address, connect_timeout=_CONNECT_S, **given):
            pass
    except psycopg.Error as error:
        explained = connect_error(error, subject, "tables.catalog_uri")
        yield _tables_wait(subject, explained.message, explained.hint)
    else:
        yield contact(subject)


def _tables_wait(subject: str, evidence: str, change: str) -> Finding:
    return advice(
        "catalog-refuses",
        Severity.CRITICAL,
        subject,
        evidence,
        "slottables run ends: it does not get to its tables",
        change,
    )


def _rest(tables: TablesSettings, subject: str) -> Iterator[Finding]:
    """Ask a REST catalog for its configuration, as each client does first."""
    token = tables.catalog_options.get("token")
    url = f"{tables.catalog_uri.rstrip('/')}/v1/config"
    if not url.startswith(("http://", "https://")):
        yield _tables_wait(subject, "tables.catalog_uri is not a URL", "correct it")
        return
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http, as checked
    try:
        with urllib.request.urlopen(request, timeout=_CONNECT_S):  # noqa: S310
            yield contact(subject)
    except urllib.error.HTTPError as error:
        if error.code in _DENIED and "credential" in tables.catalog_options:
            yield not_judged(subject, "it answers; only Spark can ask for a token by credential")
            return
        change = "correct tables.catalog_uri and tables.catalog_options"
        yield _tables_wait(subject, f"{url} answers {error.code} {error.reason}", change)
    except OSError as error:
        yield _tables_wait(subject, f"{url}: {error}", "check that it runs, and the URI")
