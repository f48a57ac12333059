"""`slotbridge teardown`: removes what the bridge has made in the database and, if asked, in Kafka.

order   the slot, then origin and sequence, then the publication (`publication`), then the topics
        (`topics`)
refused while a bridge has the slot, while commits wait for it, while two hosts accept writes, or
        while another slot's progress is in the topics that are to go

A killed teardown is finished by another one: what is gone already is left out. Copies of the slot
on standbys are removed by slot synchronization.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import psycopg
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from psycopg import sql

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SetupError
from schemas.events import progress_topic
from schemas.settings import KafkaSettings, SourceSettings
from schemas.shaping import ShapingSettings
from services.bridge.sink.topics import Topics
from services.bridge.source.awaited_commits import require_no_waiting_commits
from services.bridge.source.candidates import find_primary, require_one_writable
from services.bridge.source.server_errors import server_error
from services.bridge.source.witness import OriginWitness, SequenceWitness
from services.kafka.client import client_options, kafka_error, make_client
from services.kafka.records import READ_DEADLINE_S
from services.postgres import slots
from services.postgres.publications import publication_oid
from services.postgres.server import Connection
from services.postgres.witness_sequences import drop_statement

OPERATION = "tear down"
_DELETE_TIMEOUT_S = 60.0
_AS_SUPERUSER = "run teardown as a superuser: set SLOTBRIDGE_SOURCE__CONNINFO for this command"
_MAY_DROP = {
    "slot": "SELECT bool_or(rolname = current_user AND (rolsuper OR rolreplication)"
    " OR rolname = 'rds_replication' AND pg_has_role(oid, 'USAGE')) FROM pg_roles WHERE %s <> ''",
    "origin": "SELECT has_function_privilege('pg_replication_origin_drop(text)', 'EXECUTE')"
    " AND %s <> ''",
    "sequence": "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class c JOIN pg_namespace n"
    " ON n.oid = relnamespace WHERE relkind = 'S' AND nspname || '.' || relname = %s",
    "publication": "SELECT pg_has_role(pubowner, 'USAGE') FROM pg_publication WHERE pubname = %s",
}
"""Whether our role may drop an object of a kind, by its name."""


@dataclass(frozen=True, slots=True)
class Removal:
    """One thing to remove: its kind, its name, and what removes it."""

    kind: str
    name: str
    remove: Callable[[], None]


def removals(
    source: SourceSettings,
    kafka: KafkaSettings,
    shaping: ShapingSettings,
    *,
    publication: bool,
    topics: bool,
) -> tuple[Connection, list[Removal]]:
    """Return the objects to remove, in order, and a connection to the primary.

    Raise SlotbridgeError where something still uses it.
    """
    require_one_writable(source, OPERATION)
    found = Topics(kafka, shaping) if topics else None
    connection = find_primary(source).connection
    try:
        planned = list(_in_database(connection, source, publication=publication))
        _require_rights(connection, planned, source.slot)
        if found is not None:
            found.refresh()
            planned += _in_kafka(found, source.slot)
    except psycopg.Error as error:
        connection.close()
        raise _refused(error, source.slot) from error
    except BaseException:
        connection.close()
        raise
    return connection, planned


def _in_database(
    connection: Connection, source: SourceSettings, *, publication: bool
) -> Iterator[Removal]:
    """Yield what can be removed: slot, origin, sequence, and the publication if asked.

    Raise Retryable while a bridge uses the slot.
    """
    slot = slots.read_slot(connection, source.slot)
    require_no_waiting_commits(connection, source.slot, OPERATION)
    if slot is not None:
        if slot.active_pid is not None:
            raise Retryable(
                f"a bridge uses the slot (walsender {slot.active_pid})",
                operation=OPERATION,
                subject=f"slot {source.slot}",
                hint="stop the bridge, then run teardown again",
                exit_code=ExitCode.SLOT_IN_USE,
            )
        yield _statement(
            connection, source.slot, "slot", source.slot, "SELECT pg_drop_replication_slot(%s)"
        )
    origin, sequence = OriginWitness(source.slot), SequenceWitness(source.slot)
    if origin.exists(connection):
        yield _statement(
            connection, source.slot, "origin", origin.name, "SELECT pg_replication_origin_drop(%s)"
        )
    if sequence.exists(connection):
        drop = drop_statement(source.slot)
        yield _statement(connection, source.slot, "sequence", sequence.name, drop)
    if publication and publication_oid(connection, source.publication) is not None:
        name = source.publication
        statement = sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(name))
        yield _statement(connection, source.slot, "publication", name, statement)


def _require_rights(connection: Connection, planned: list[Removal], slot: str) -> None:
    """Raise SetupError where our role may not drop all of it: half of it would be gone."""
    denied = [
        f"{one.kind} {one.name}"
        for one in planned
        if connection.execute(_MAY_DROP[one.kind].encode(), [one.name]).fetchone() == (False,)
    ]
    if denied:
        raise SetupError(
            f"the role may not drop {', '.join(denied)}; nothing is removed",
            operation=OPERATION,
            subject=f"slot {slot}",
            hint=_AS_SUPERUSER,
            exit_code=ExitCode.PRIVILEGE_MISSING,
        )


def _statement(
    connection: Connection, slot: str, kind: str, name: str, statement: str | sql.Composed
) -> Removal:
    """Return a removal that executes the statement, with `name` as its parameter if it has one."""

    def remove() -> None:
        given = None if isinstance(statement, sql.Composed) else [name]
        try:
            connection.execute(statement, given)  # type: ignore[arg-type, unused-ignore]
        except psycopg.Error as error:
            raise _refused(error, slot) from error

    return Removal(kind, name, remove)


def _refused(error: psycopg.Error, slot: str) -> Exception:
    """Return our error for what PostgreSQL answered to a removal."""
    state, text = error.sqlstate or "08", error.diag.message_primary or str(error)
    if state == "42501":
        return SetupError(
            text,
            operation=OPERATION,
            subject=f"slot {slot}",
            hint=_AS_SUPERUSER,
            exit_code=ExitCode.PRIVILEGE_MISSING,
        )
    return server_error(state, text, OPERATION, f"slot {slot}")


def _in_kafka(topics: Topics, slot: str) -> list[Removal]:
    """Return the removals of the prefix's topics, the progress topic last. Raise OperatorNeeded.

    Topics that settings route tables to stay: they may be others' as well.
    """
    others = _other_slots(topics, slot)
    if others:
        raise OperatorNeeded(
            f"another slot publishes into these topics: {', '.join(others)}",
            operation=OPERATION,
            subject=f"prefix {topics.prefix}",
            hint="leave out --topics, or tear the other bridge down first",
        )
    admin: AdminClient = make_client(AdminClient, client_options(topics.settings))
    names = {topic for topic, _ in topics.written() if topic.startswith(f"{topics.prefix}.")}

    progress = progress_topic(topics.prefix)  # last: it tells another run whose topics these are
    ordered = sorted(names, key=lambda name: (name == progress, name))
    return [Removal("topic", name, partial(delete_topic, admin, name)) for name in ordered]


def delete_topic(admin: AdminClient, name: str) -> None:
    """Delete a topic. Raise SlotbridgeError where Kafka refuses that, or does not answer."""
    try:
        asked = admin.delete_topics([name], request_timeout=_DELETE_TIMEOUT_S)
        asked[name].result()
    except KafkaException as error:
        raise kafka_error(error, OPERATION, f"topic {name}") from error


def _other_slots(topics: Topics, slot: str) -> list[str]:
    """Return the slots besides `slot` whose progress records are in the progress topic."""
    if not topics.there(progress_topic(topics.prefix)):
        return []
    with topics.reader(progress_topic(topics.prefix)) as reader:
        low, end = reader.bounds()
        last: dict[str, bool] = {}
        for _, key, value in reader.between(low, end, time.monotonic() + READ_DEADLINE_S):
            last[_text(key)] = value is not None
    names = [name for name, there in last.items() if there]
    return sorted(name for name in names if name and not name.startswith("~") and name != slot)


def _text(key: bytes | str | None) -> str:
    return key.decode(errors="replace") if isinstance(key, bytes) else key or ""
