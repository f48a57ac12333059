r"""Rows of COPY (SELECT …) TO STDOUT as pgoutput's inserts, which the stream's encoder takes.

    line of COPY    a field for each published column, the key, and t or f where the rows are
                    filtered; between them tabs; \N is NULL, \t \n \\ … stand for what they name
    message         'I' oid:u32 'N' n:u16 { 't' length:u32 bytes | 'n' }, as if the row came now

The C extension reads lines without an object for each. Without it, or where libpq's function can't
be had, `plain_lines` does the same. Sources: copyto.c, CopyAttributeOutText; PostgreSQL
documentation 32.10 "Functions Associated with the COPY Command".
"""

import re
from typing import Final, NamedTuple

import psycopg
from psycopg import pq

from services.bridge import compiled
from services.bridge.compiled import Messages, new_messages
from services.bridge.pgoutput.messages import Relation
from services.bridge.source.libpq import GET_COPY_DATA, address
from services.bridge.source.readiness import wait_readable

_LOOK_S: Final = 1.0
ROW_AT: Final = 8
"""Where a message's values begin."""
FAILED: Final = -2
"""What PQgetCopyData returns where the connection is lost; psycopg raises an error for it."""
DROPPED_BYTES_MAX: Final = 64 * 2**20
"""How much of a COPY that has more than is wanted is read to its end."""
_ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)
_MEANINGS: Final = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


class LineForm(NamedTuple):
    """The fields of a line, and how its message begins.

    `width` columns and `keys` of the key; `filtered`: a last one tells whether the row is wanted.
    """

    oid: int
    head: bytes
    width: int
    keys: int = 0
    filtered: bool = False


class Lines(NamedTuple):
    """The lines that were taken: how many, their bytes, and what follows the last one's columns.

    `state`: 1 where there may be more, else PQgetCopyData's: 0 none yet, -1 the end.
    """

    state: int
    taken: int
    size: int
    rest: bytes


class CopiedRows(NamedTuple):
    """The wanted rows as messages, and the key of the last one of all that were looked at.

    `ends`: there are none after them.
    """

    messages: Messages
    last: list[str] | None
    looked_at: int
    bytes: int
    ends: bool


class RowsTooLarge(psycopg.OperationalError):
    """Many more bytes come than are wanted. The connection is of no use any more."""

    def __init__(self, oid: int, row_bytes: float) -> None:
        super().__init__(f"rows are larger than before, {row_bytes:.0f} bytes each")
        self.oid, self.row_bytes = oid, row_bytes


def form_of(relation: Relation, keys: int = 0, *, filtered: bool = False) -> LineForm:
    """Return the form of lines that have the relation's columns, `keys` others, and the filter."""
    width = len(relation.columns)
    head = b"I" + relation.oid.to_bytes(4, "big") + b"N" + width.to_bytes(2, "big")
    return LineForm(relation.oid, head, width, keys, filtered)


def copy_rows(
    connection: pq.abc.PGconn, query: bytes, form: LineForm, rows_max: int, bytes_max: int
) -> CopiedRows:
    """Read up to `rows_max` rows of a query, or those that have `bytes_max`; at least one.

    Raise psycopg.Error; RowsTooLarge where the query has much more than that.
    """
    begin_copy(connection, query)
    messages = new_messages()
    lines = copy_lines(connection, messages, form, rows_max, bytes_max)
    ends = lines.state < 0 or not _drop(connection, form, lines, rows_max)
    end_copy(connection)
    last = None
    if lines.taken and form.keys:
        fields = lines.rest.split(b"\t")[-form.keys - form.filtered :]
        last = [(value_of(field) or b"").decode() for field in fields[: form.keys]]
    return CopiedRows(messages, last, lines.taken, lines.size, ends)


def begin_copy(connection: pq.abc.PGconn, query: bytes) -> None:
    """Start COPY TO STDOUT of a query. Raise psycopg.Error."""
    # Not exec_: a condition of somebody else's in the query must not end it and begin another one.
    require_copy(connection.exec_params(b"COPY (" + query + b") TO STDOUT", []))


def require_copy(result: pq.abc.PGresult | None) -> None:
    """Raise psycopg.Error where this is not the beginning of COPY TO STDOUT."""
    assert result is not None
    if result.status != pq.ExecStatus.COPY_OUT:
        raise psycopg.errors.error_from_result(result, encoding="utf-8")


def end_copy(connection: pq.abc.PGconn) -> None:
    """Raise psycopg.Error where the COPY that has no more lines was ended by an error."""
    failed = None
    while (result := _result(connection)) is not None:
        if result.status != pq.ExecStatus.COMMAND_OK:
            failed = failed or result
    if failed is not None:
        raise psycopg.errors.error_from_result(failed, encoding="utf-8")


def copy_lines(
    connection: pq.abc.PGconn,
    messages: Messages,
    form: LineForm,
    rows_max: int,
    bytes_max: int,
    *,
    nonblocking: bool = False,
) -> Lines:
    """Append the rows of up to `rows_max` lines, or of those that have `bytes_max`."""
    given = form.head, form.width, form.keys, form.filtered, rows_max, bytes_max
    if compiled.engine is None or not GET_COPY_DATA:
        return plain_lines(connection, messages, form, rows_max, bytes_max, nonblocking=nonblocking)
    lines = Lines(
        *compiled.engine.messages.copy_lines(
            GET_COPY_DATA, address(connection), nonblocking, messages, *given
        )
    )
    if lines.state == FAILED:
        raise psycopg.OperationalError(connection.get_error_message())
    return lines


def plain_lines(
    connection: pq.abc.PGconn,
    messages: Messages,
    form: LineForm,
    rows_max: int,
    bytes_max: int,
    *,
    nonblocking: bool,
) -> Lines:
    """Do what `copy_lines` does, without the C extension."""
    state, count, size, fields = 1, 0, 0, [b""]
    while count < rows_max and size < bytes_max:
        state, data = connection.get_copy_data(1) if nonblocking else _next_line(connection)
        if state <= 0:
            break
        fields = bytes(data).removesuffix(b"\n").split(b"\t")
        if not form.filtered or fields[-1] == b"t":
            values = [_as_pgoutput(field) for field in fields[: form.width]]
            messages.append((0, b"".join([form.head, *values])))
        count, size = count + 1, size + state
    return Lines(state, count, size, b"\t".join(fields[form.width :]))


def value_of(field: bytes) -> bytes | None:
    """Return the text that a field stands for, None for NULL."""
    if field == rb"\N":
        return None
    if b"\\" not in field:
        return field
    return _ESCAPED.sub(lambda escaped: _MEANINGS.get(escaped[1], escaped[1]), field)


def _as_pgoutput(field: bytes) -> bytes:
    value = value_of(field)
    return b"n" if value is None else b"t" + len(value).to_bytes(4, "big") + value


def _drop(connection: pq.abc.PGconn, form: LineForm, lines: Lines, rows_max: int) -> int:
    """Read the rest of a COPY of at most `rows_max` + 1 lines; return how many lines that are."""
    count = size = 0
    while (state := _next_line(connection)[0]) > 0:
        count, size = count + 1, size + state
        if size > DROPPED_BYTES_MAX and lines.taken + count <= rows_max:
            connection.finish()
            raise RowsTooLarge(form.oid, (lines.size + size) / (lines.taken + count))
    return count


# psycopg's functions that wait for the server in C, but for exec_params, do so with the GIL.
def _next_line(connection: pq.abc.PGconn) -> tuple[int, memoryview]:
    while not (line := connection.get_copy_data(1))[0]:
        _wait(connection)
    return line


def _result(connection: pq.abc.PGconn) -> pq.abc.PGresult | None:
    while connection.is_busy():
        _wait(connection)
    return connection.get_result()


def _wait(connection: pq.abc.PGconn) -> None:
    wait_readable([connection.socket], _LOOK_S)
    connection.consume_input()
