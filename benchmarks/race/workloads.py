"""What is raced over: tables, and the load that is made once.

a  narrow rows, transactions of 10          f  100 tables, transactions of 10
b  pgbench's own transactions               g  one row in each transaction
c  60 columns, 2 KB a row                   h  jsonb and text with escapes and non-ASCII
d  updates under REPLICA IDENTITY FULL      i  a as seen by a publication of 10 % of the rows
e  one transaction, streamed; E: not streamed
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchmarks.bridge import Connection
from services.testbed.postgres import PostgresServer

ROWS_A_TRANSACTION: Final = 10
DONE_TABLE: Final = "done"
"""Gets one row after the load: a contender is done when a consumer sees it."""
_PGBENCH_CHANGES: Final = 4
_NARROW = "(id bigint PRIMARY KEY, a int, b text, c numeric, d text, e timestamptz)"
_NARROW_ROW = (
    "g, (g % 100000)::int, 'customer-' || g, (g % 1000) + 0.25, md5(g::text),"
    " timestamptz '2026-01-01 00:00:00.123456+00' + g * interval '1 second'"
)


@dataclass(frozen=True, slots=True)
class Workload:
    """`rows`: how many changes a full run has; `tables`: those whose changes are published."""

    title: str
    rows: int
    tables: tuple[str, ...]
    setup: str
    load: Callable[[PostgresServer, Connection, int], None]
    streaming: bool = True
    published_share: float = 1.0


def _in_transactions(
    statement: str, rows_each: int = ROWS_A_TRANSACTION
) -> Callable[[PostgresServer, Connection, int], None]:
    """`statement` again and again, each in a transaction; `base` is its first row."""

    def load(_server: PostgresServer, connection: Connection, rows: int) -> None:
        connection.execute(_loop(statement, range(1, rows + 1, rows_each)))

    return load


def _loop(statement: str, bases: range) -> bytes:
    return (
        f"DO $$ BEGIN FOR base IN {bases.start}..{bases.stop - 1} BY {bases.step} LOOP {statement};"
        " COMMIT; END LOOP; END $$"
    ).encode()


def _rows(table: str, row: str, rows_each: int = ROWS_A_TRANSACTION) -> str:
    series = f"generate_series(base, base + {rows_each - 1})"
    return f"INSERT INTO {table} SELECT {row} FROM {series} AS g"


def _pgbench(server: PostgresServer, connection: Connection, rows: int) -> None:
    dbname = connection.info.dbname
    count = str(rows // _PGBENCH_CHANGES)
    server.run_tool("pgbench", ["-n", "-c", "1", "-t", count, server.conninfo(dbname)])


def _single(_server: PostgresServer, connection: Connection, rows: int) -> None:
    series = f"generate_series(1, {rows}) AS g"
    connection.execute(f"INSERT INTO narrow SELECT {_NARROW_ROW} FROM {series}".encode())


def _updates(server: PostgresServer, connection: Connection, rows: int) -> None:
    of_table = f"generate_series(1, {rows // 2}) AS g"
    connection.execute(f"INSERT INTO narrow SELECT {_NARROW_ROW} FROM {of_table}".encode())
    update = "UPDATE narrow SET a = a + 1, e = now() WHERE id >= base AND id < base + 10"
    _in_transactions(update)(server, connection, rows // 2)


def _wide() -> tuple[str, str]:
    """60 columns: a key, and numbers, texts, times and flags in turn; about 2 KB."""
    kinds = (
        ("bigint", "g * 1000003::bigint"),
        ("text", "repeat(md5(g::text), 3)"),
        ("numeric(12,2)", "g / 7.0"),
        ("timestamp", "timestamp '2026-01-01' + g * interval '1 minute'"),
        ("boolean", "g % 2 = 0"),
    )
    columns, values = ["id bigint PRIMARY KEY"], ["g"]
    for number in range(1, 60):
        kind, value = kinds[number % len(kinds)]
        columns.append(f"column_{number} {kind}")
        values.append(value)
    return f"CREATE TABLE wide ({', '.join(columns)})", ", ".join(values)


_WIDE_TABLE, _WIDE_ROW = _wide()
_TEXTS_ROW = (
    "g, jsonb_build_object('id', g, 'naïve', E'tab\\tquote\" back\\\\slash\\nline', 'tags',"
    " jsonb_build_array('größe', '価格', '😀', md5(g::text)), 'text', "
    " repeat('Zürich – \"x\" ', 20)),"
    " repeat(E'<p class=\"größe\">\\t価格: 100 €\\n</p>', 12)"
)


def narrow(rows_each: int, rows: int) -> Workload:
    """One table of narrow rows, `rows_each` in each transaction."""
    return Workload(
        f"narrow rows, transactions of {rows_each:,}",
        rows,
        ("narrow",),
        f"CREATE TABLE narrow {_NARROW}",
        _in_transactions(_rows("narrow", _NARROW_ROW, rows_each), rows_each),
    )


def narrow_inserts(first: int, rows: int) -> bytes:
    """A script for the rows from `first` on into `narrow`'s table, ten in each transaction."""
    return _loop(_rows("narrow", _NARROW_ROW), range(first, first + rows, ROWS_A_TRANSACTION))


def many(tables: int, rows: int) -> Workload:
    """`tables` tables of narrow rows; each transaction writes into one, in turns."""
    insert = (
        "EXECUTE format('INSERT INTO narrow_%s SELECT "
        + _NARROW_ROW.replace("'", "''").replace("%", "%%")
        + f" FROM generate_series($1, $1 + 9) AS g', base / 10 % {tables}) USING base"
    )
    return Workload(
        f"{tables:,} tables",
        rows,
        tuple(f"narrow_{number}" for number in range(tables)),
        f"DO $$ BEGIN FOR number IN 0..{tables - 1} LOOP "
        f"EXECUTE format('CREATE TABLE narrow_%s {_NARROW}', number); COMMIT; END LOOP; END $$",
        _in_transactions(insert),
    )


def sized(width: int, rows: int) -> Workload:
    """Rows with a text of `width` characters, which does not compress well."""
    noise, length = 320_000, width // 2
    since = f"1 + (g::bigint * 7919 % {noise - length})::int"
    piece = f"substr((SELECT body FROM noise), {since}, {length})"
    return Workload(
        f"rows of {width:,} characters",
        rows,
        ("sized",),
        "CREATE TABLE sized (id bigint PRIMARY KEY, body text); CREATE TABLE noise (body bytea);"
        " ALTER TABLE sized ALTER body SET STORAGE EXTERNAL;"
        " ALTER TABLE noise ALTER body SET STORAGE EXTERNAL; INSERT INTO noise"
        " SELECT decode(string_agg(md5(n::text), ''), 'hex')"
        f" FROM generate_series(1, {noise // 16}) AS n",
        _in_transactions(_rows("sized", f"g, encode({piece}, 'hex')")),
    )


WORKLOADS: Final[dict[str, Workload]] = {
    "a": narrow(ROWS_A_TRANSACTION, 400_000),
    "b": Workload(
        "pgbench",
        200_000,
        ("pgbench_accounts", "pgbench_branches", "pgbench_tellers", "pgbench_history"),
        "",
        _pgbench,
    ),
    "c": Workload(
        "60 columns, 2 KB",
        60_000,
        ("wide",),
        _WIDE_TABLE,
        _in_transactions(_rows("wide", _WIDE_ROW)),
    ),
    "d": Workload(
        "updates, REPLICA IDENTITY FULL (and their inserts)",
        200_000,
        ("narrow",),
        f"CREATE TABLE narrow {_NARROW}; ALTER TABLE narrow REPLICA IDENTITY FULL",
        _updates,
    ),
    "e": Workload(
        "one transaction, streamed",
        1_000_000,
        ("narrow",),
        f"CREATE TABLE narrow {_NARROW}",
        _single,
    ),
    "E": Workload(
        "one transaction, not streamed",
        1_000_000,
        ("narrow",),
        f"CREATE TABLE narrow {_NARROW}",
        _single,
        streaming=False,
    ),
    "f": many(100, 300_000),
    "g": narrow(1, 200_000),
    "h": Workload(
        "jsonb and text, escapes, non-ASCII",
        100_000,
        ("texts",),
        "CREATE TABLE texts (id bigint PRIMARY KEY, document jsonb, body text)",
        _in_transactions(_rows("texts", _TEXTS_ROW)),
    ),
    "i": Workload(
        "9 of 10 rows not published",
        500_000,
        ("narrow",),
        f"CREATE TABLE narrow {_NARROW}; CREATE TABLE hidden {_NARROW}",
        _in_transactions(
            f"INSERT INTO narrow SELECT {_NARROW_ROW} FROM generate_series(base, base) AS g; "
            f"INSERT INTO hidden SELECT {_NARROW_ROW} FROM generate_series(base, base + 8) AS g"
        ),
        published_share=0.1,
    ),
}
