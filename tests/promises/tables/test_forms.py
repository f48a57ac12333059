"""Values of a real PostgreSQL in the form in which they are compared."""

import json

import psycopg
import pytest
from psycopg import sql

from spark_consumers.verify import postgres
from spark_consumers.verify.forms import value_sql
from tests.providers.interface import Provider


@pytest.mark.long
def test_an_array_of_a_composite_type_is_one_column(pair: Provider, fresh_database: str) -> None:
    with psycopg.connect(pair.primary.conninfo(fresh_database), autocommit=True) as connection:
        connection.execute("CREATE TYPE pt AS (x int, y text)")
        connection.execute("CREATE TABLE pts (id int PRIMARY KEY, v pt[], grid int[])")
        connection.execute(
            "INSERT INTO pts VALUES (2, '{}', NULL),"
            " (1, ARRAY[(1, 'a \"b')::pt, NULL, (2, NULL)::pt], '{{1,2},{3,4}}')"
        )
        layers = postgres.column_layers(connection, ("public", "pts"))
        values = [value_sql(name, layers[name]) for name in ("v", "grid")]
        query = sql.SQL("SELECT {} FROM pts ORDER BY id").format(sql.SQL(", ").join(values))
        found = connection.execute(query).fetchall()
    assert found == [(['(1,"a ""b")', None, "(2,)"], [[1, 2], [3, 4]]), ([], None)]
    assert json.dumps(found)
