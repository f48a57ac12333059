"""The settings that `slotbridge init --from` proposes for a pair.

a table without identity     left out, unless its name is given: then with REPLICA IDENTITY FULL
an unlogged table            left out: its rows are not in the WAL
a name with a second dot     left out: `source.tables` can't have it

Every table is listed by name: a publication FOR ALL TABLES can't be narrowed later.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from psycopg.conninfo import make_conninfo

from schemas.errors import SettingsError
from schemas.example import Value, as_yaml
from schemas.naming import table_matches
from services.bridge.proposal.pair import FoundTable, Node, Pair

_KEPT: Final = (
    *("sslmode", "sslrootcert", "sslnegotiation", "gssencmode", "channel_binding"),
    "require_auth",
)
"""Parameters of the connection string that hold for the services' roles, too."""
_SLOT_OF_NODE: Final = re.compile(r"slotfailover_([a-z0-9_]+)")
_NO_IDENTITY: Final = "no primary key: once it is published, UPDATE and DELETE fail"
_LISTED_MAX: Final = 20


def unfit(table: FoundTable) -> str:
    """Return why a table can't be published by name, "" where it can."""
    if table.unlogged:
        return "unlogged: its rows are not in the WAL"
    return "its name has a dot" if table.full_name.count(".") > 1 else ""


def overview(pair: Pair) -> Iterator[str]:
    """Yield lines about servers and tables, for a person who has to choose."""
    for node in pair.nodes:
        role = "standby" if node.standby else "primary"
        yield f"{role}  {node.host}:{node.port}, PostgreSQL {_version(node)}"
    for host, why in pair.silent:
        yield f"not judged: {host}: {why}"
    yield f"tables of database {_plain(pair.database)}:"
    for table in pair.tables:
        yield f"  {_plain(table.full_name)}: {described(table)}"


def select(pair: Pair, patterns: Sequence[str]) -> tuple[FoundTable, ...]:
    """Return the tables to publish: those that patterns name, or all that have an identity.

    Raise SettingsError where a pattern names none, or one that can't be published.
    """
    fit = [table for table in pair.tables if not unfit(table)]
    if not patterns:
        chosen = [table for table in fit if table.identified]
        if not chosen:
            raise _refused(pair, "no table with a primary key is", "any")
        return tuple(chosen)
    chosen = []
    for pattern in patterns:
        named = [one for one in pair.tables if table_matches(pattern, one.schema, one.name)]
        chosen += [table for table in named if table in fit and table not in chosen]
        if not named or not set(named) & set(fit):
            reason = f", but {unfit(named[0])}" if named else ""
            raise _refused(pair, f"no table that can be published{reason} is", pattern)
    return tuple(chosen)


def _refused(pair: Pair, what: str, pattern: str) -> SettingsError:
    names = [_plain(table.full_name) for table in pair.tables[:_LISTED_MAX]]
    more = " …" if len(pair.tables) > _LISTED_MAX else ""
    return SettingsError(
        f"{what} in database {pair.database} ({pattern})",
        operation="propose tables",
        hint=f"name some in --tables: {', '.join(names)}{more}"
        if names
        else "create the tables first, or name another database in --from",
    )


def proposed(
    pair: Pair, chosen: Sequence[FoundTable], *, kafka: str, prefix: str
) -> dict[str, Value]:
    """Return key of the settings -> its value; without `kafka`, an example of brokers stays."""
    values: dict[str, Value] = {
        "source.conninfo": _conninfo(pair, pair.nodes, "slotbridge", read_write=True),
        "source.tables": [*_table_lines(pair, chosen)],
        "kafka.topic_prefix": prefix or re.sub(r"[^A-Za-z0-9._-]", "_", pair.database)[:100],
        "kafka.replication_factor": None,
        "bridge.spool_folder": None,
        "failover.journal": None,
    }
    if kafka:
        values["kafka.bootstrap_servers"] = kafka
    if pair.slots.get("slotbridge", pair.database) != pair.database:
        values["source.slot"] = re.sub(r"[^a-z0-9_]", "_", f"slotbridge_{pair.database}")[:40]
    full = [table.full_name for table in chosen if not table.identified]
    if full:
        values["source.replica_identity"] = [f"{as_yaml(name)}: full" for name in full]
    if len(pair.nodes) > 1:
        names = _node_names(pair.nodes)
        for key, user in (("nodes", "slotfailover"), ("admins", pair.user)):
            values[f"failover.{key}"] = [
                f"{name}: {as_yaml(_conninfo(pair, [node], user))}" for name, node in names.items()
            ]
    return values


def notes(pair: Pair) -> Iterator[str]:
    """Yield what the file can't say: what is on the servers already, and what they lack."""
    primaries = [node for node in pair.nodes if not node.standby]
    if len(primaries) != 1:
        yield f"{len(primaries)} of {len(pair.nodes)} servers are primaries: name one, and standbys"
    for node in pair.nodes:
        if node.lack:
            yield f"{node.host}:{node.port}: {node.lack}"
    if len(pair.nodes) == 1:
        yield "one server answers: without a standby there is no section failover"
    if pair.publications.get("slotbridge"):
        yield (
            "publication slotbridge is there, FOR ALL TABLES: source.tables has no effect on it; "
            "name another one in source.publication"
        )


def described(table: FoundTable) -> str:
    """Return size, key and what the table lacks, in one line."""
    rows = "rows not counted" if table.rows < 0 else f"about {table.rows:,} rows"
    parts = [table.size, rows, f"key {', '.join(table.key)}" if table.key else ""]
    if table.partitioned:
        parts.append("partitioned")
    if reason := unfit(table):
        parts.append(reason)
    elif not table.identified:
        parts.append(_NO_IDENTITY)
    if table.opaque:
        parts.append(f"as PostgreSQL's text: {', '.join(table.opaque)}")
    return _plain("; ".join(filter(None, parts)))


def _table_lines(pair: Pair, chosen: Sequence[FoundTable]) -> Iterator[str]:
    for table in pair.tables:
        listed = f"- {as_yaml(table.full_name)}"
        if table in chosen:
            full = "" if table.identified else "; it gets REPLICA IDENTITY FULL"
            yield f"{listed}  # {described(table)}{full}"
        else:
            yield f"# - {_plain(table.full_name)}  # not chosen: {described(table)}"


def _conninfo(pair: Pair, nodes: Sequence[Node], user: str, *, read_write: bool = False) -> str:
    """Return a connection string without a password."""
    given = {key: value for key, value in pair.parameters.items() if key in _KEPT}
    more = {"target_session_attrs": "read-write"} if read_write else {}
    return make_conninfo(
        "",
        host=",".join(node.host for node in nodes),
        port=",".join(node.port for node in nodes),
        dbname=pair.database,
        user=user,
        **given,
        **more,
    )


def _node_names(nodes: Sequence[Node]) -> dict[str, Node]:
    """Name the nodes: a standby as its slot `slotfailover_NAME` does, the others a, b, c."""
    free = iter(sorted({*"abcdefghijklmnop"} - {_name_in(node) for node in nodes}))
    return {_name_in(node) or next(free): node for node in nodes}


def _name_in(node: Node) -> str:
    match = _SLOT_OF_NODE.fullmatch(node.slot_name)
    return match[1] if match else ""


def _version(node: Node) -> str:
    return f"{node.version // 10000}.{node.version % 10000}"


def _plain(text: str) -> str:
    """Return a text that fits a line of a comment or of a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
