"""Rows of queries that always return exactly one."""

from typing import TypeVar

import psycopg

Row = TypeVar("Row")


def one_row(cursor: psycopg.Cursor[Row]) -> Row:
    """Return the row of a query that always has one, such as SELECT of a function.

    Raise LookupError where it has none: then the query is wrong, not the server.
    """
    row = cursor.fetchone()
    if row is None:
        raise LookupError("the query returned no row")
    return row
