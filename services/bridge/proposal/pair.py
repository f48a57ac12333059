"""Reads what `slotbridge init --from` proposes settings for: the pair, its tables, what is there.

Reads only; nothing on the servers changes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, LiteralString

import psycopg
from psycopg.conninfo import conninfo_to_dict

from schemas.errors import SetupError, SlotbridgeError
from schemas.settings import SourceSettings
from services.bridge.events.values.encoders import Encoders
from services.bridge.source.hosts import host_name, single_hosts
from services.bridge.source.server_errors import connect_error
from services.bridge.source.server_requirements import check_server
from services.bridge.source.type_catalog import read_types
from services.postgres.published_tables import IS_IDENTITY
from services.postgres.server import Connection, read_server, setting
from services.postgres.sessions import STATUS, open_session
from services.postgres.slots import read_slots

_OWN_SCHEMAS: Final = ["slotbridge", "slotfailover"]


@dataclass(frozen=True, slots=True)
class Node:
    """A server that answers. `lack`: why the bridge refuses it, and the remedy.

    `slot_name`: the physical slot by which a standby streams.
    """

    host: str
    port: str
    standby: bool
    version: int
    lack: str = ""
    slot_name: str = ""


@dataclass(frozen=True, slots=True)
class FoundTable:
    """A table, or the root of partitions. `rows`: estimated, -1 where the server has not counted.

    `identified`: UPDATE and DELETE work once it is published. `opaque`: columns, with their types,
    whose values come as PostgreSQL's text.
    """

    schema: str
    name: str
    partitioned: bool
    unlogged: bool
    identified: bool
    key: tuple[str, ...]
    rows: int
    size: str
    opaque: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name of the table with its schema."""
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class Pair:
    """The servers that answered; `silent`: (host, why) of the hosts that did not.

    `publications`: name -> whether it is for all tables. `slots`: name -> its database.
    """

    database: str
    user: str
    superuser: bool
    parameters: dict[str, str]
    nodes: tuple[Node, ...]
    silent: tuple[tuple[str, str], ...]
    tables: tuple[FoundTable, ...]
    publications: dict[str, bool]
    slots: dict[str, str]


_TABLES: LiteralString = (
    """
    SELECT n.nspname::text, c.relname::text, c.relkind = 'p', c.relpersistence = 'u',
           c.relreplident = 'f' OR EXISTS (
               SELECT FROM pg_index i WHERE i.indrelid = c.oid AND """  # noqa: S608 - our own words
    + IS_IDENTITY
    + """),
           ARRAY(SELECT a.attname::text FROM pg_index i
                   CROSS JOIN unnest(i.indkey::int2[]) WITH ORDINALITY part (attnum, number)
                   JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = part.attnum
                  WHERE i.indrelid = c.oid AND i.indisprimary AND number <= i.indnkeyatts
                  ORDER BY number),
           (WITH of_table AS (
              SELECT c.oid AS relid UNION SELECT relid FROM pg_partition_tree(c.oid))
            SELECT CASE WHEN min(counted) < 0 THEN -1 ELSE coalesce(sum(counted), 0) END::bigint
              FROM of_table JOIN pg_class leaf ON leaf.oid = relid AND leaf.relkind = 'r',
                   greatest(leaf.reltuples, nullif(pg_stat_get_live_tuples(leaf.oid), 0)) counted),
           (SELECT pg_size_pretty(sum(pg_table_size(relid))) FROM (
              SELECT c.oid AS relid UNION SELECT relid FROM pg_partition_tree(c.oid)) of_table),
           ARRAY(SELECT a.attname::text FROM pg_attribute a
                  WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                  ORDER BY a.attnum),
           ARRAY(SELECT a.atttypid::bigint FROM pg_attribute a
                  WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                  ORDER BY a.attnum)
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence <> 't'
       AND c.oid >= 16384 AND n.nspname !~ '^pg_' AND n.nspname <> ALL (%s)
     ORDER BY 1, 2
"""
)


def read_pair(source: SourceSettings) -> Pair:
    """Ask every host of `source.conninfo`. Raise SlotbridgeError where none answers."""
    nodes: list[Node] = []
    silent: list[tuple[str, SlotbridgeError]] = []
    conninfos: dict[str, str] = {}
    for conninfo in single_hosts(source):
        name = host_name(conninfo)
        try:
            with open_session(STATUS, conninfo) as connection:
                node = _node(connection, conninfo)
        except psycopg.Error as error:
            silent.append((name, connect_error(error, name, "--from")))
            continue
        nodes.append(node)
        if not node.standby or not conninfos:
            conninfos = {"first": conninfo}
    if not nodes:
        raise silent[0][1]
    conninfo = conninfos["first"]
    try:
        with open_session(STATUS, conninfo) as connection:
            return _read(connection, conninfo, nodes, [(name, str(why)) for name, why in silent])
    except psycopg.Error as error:
        raise connect_error(error, host_name(conninfo), "--from") from error


def _node(connection: Connection, conninfo: str) -> Node:
    """Return a server's address, role and version, and why the bridge can't use it."""
    server, where, lack = read_server(connection), conninfo_to_dict(conninfo), ""
    try:
        check_server(server)
    except SetupError as error:
        lack = f"{error.message}: {error.hint}"
    return Node(
        host=str(where.get("host") or where.get("hostaddr") or ""),
        port=str(where.get("port") or 5432),
        standby=server.in_recovery,
        version=server.version,
        lack=lack,
        slot_name=setting(connection, "primary_slot_name") if server.in_recovery else "",
    )


def _read(
    connection: Connection, conninfo: str, nodes: list[Node], silent: list[tuple[str, str]]
) -> Pair:
    """Return the database's tables, publications and slots, with the servers that answered."""
    publications = connection.execute("SELECT pubname::text, puballtables FROM pg_publication")
    found = {str(name): bool(whole) for name, whole in publications.fetchall()}
    rows = connection.execute(_TABLES, [[*_OWN_SCHEMAS, "information_schema"]]).fetchall()
    encoders = Encoders()
    used = {oid for row in rows for oid in row[-1]}
    encoders.learn(read_types(connection, encoders.unknown(used)))
    names = _type_names(connection, {oid for oid in used if not encoders.understood(oid)})
    tables = []
    for *facts, columns, types in rows:
        opaque = (
            f"{column} ({names[oid]})"
            for column, oid in zip(columns, types, strict=True)
            if oid in names
        )
        schema, name, partitioned, unlogged, identified, key, count, size = facts
        tables.append(
            FoundTable(
                schema,
                name,
                partitioned,
                unlogged,
                identified,
                tuple(key),
                count,
                size,
                tuple(opaque),
            )
        )
    nodes.sort(key=lambda node: node.standby)
    return Pair(
        database=connection.info.dbname,
        user=connection.info.user,
        superuser=connection.info.parameter_status("is_superuser") == "on",
        parameters={key: str(value) for key, value in conninfo_to_dict(conninfo).items()},
        nodes=tuple(nodes),
        silent=tuple(silent),
        tables=tuple(tables),
        publications=found,
        slots={slot.slot_name: slot.database or "" for slot in read_slots(connection)},
    )


def _type_names(connection: Connection, oids: Iterable[int]) -> dict[int, str]:
    rows = connection.execute(
        "SELECT oid::bigint, format_type(oid, NULL) FROM pg_type WHERE oid = ANY (%s::oid[])",
        [[*oids]],
    ).fetchall()
    return {int(oid): str(name) for oid, name in rows}
