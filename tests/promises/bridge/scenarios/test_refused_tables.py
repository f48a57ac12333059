"""A table's problem is that table's: the others go on, and it is named with its remedy."""

import json
import re
from operator import itemgetter

import pytest

from services.bridge.events.values.arrays import array
from services.bridge.events.values.plain import string
from tests.promises.bridge.scenarios.conftest import Scene
from tests.promises.bridge.snapshots import told
from tests.providers.waiting import eventually

COLON = """
    CREATE TYPE pair;
    CREATE FUNCTION pair_in(cstring) RETURNS pair AS 'textin' LANGUAGE internal IMMUTABLE STRICT;
    CREATE FUNCTION pair_out(pair) RETURNS cstring AS 'textout' LANGUAGE internal IMMUTABLE STRICT;
    CREATE TYPE pair (INPUT = pair_in, OUTPUT = pair_out, LIKE = text, DELIMITER = ':');
"""


@pytest.mark.parametrize("delimiter", [",", ";", ":", "|", "^", "]", "-"])
def test_an_array_has_the_delimiter_of_its_type(delimiter: str) -> None:
    mark = delimiter.encode()
    encode = array(string, mark)
    assert encode(b"{a%bNULL%bb}" % (mark, mark)) == '["a",null,"b"]'
    assert json.loads(encode(b'{{a%b"%b"}}' % (mark, mark))) == [["a", delimiter]]


def test_the_other_tables_go_on(scene: Scene) -> None:
    """Arrays of any delimiter, rows that can't be read, topics that another table has."""
    where = {"public.unread": "note::int > 0"}
    scene.configure(
        snapshot={"mode": "initial", "where": where}, shaping={"topic": "{prefix}.{table}"}
    )
    scene.run(
        COLON,
        "CREATE TABLE unread (id int PRIMARY KEY, note text)",
        "INSERT INTO unread VALUES (1, 'secret')",
        "CREATE TABLE z (id int PRIMARY KEY, pairs pair[])",
        "CREATE TABLE progress (id int PRIMARY KEY)",
        "INSERT INTO progress VALUES (1)",
        "INSERT INTO z VALUES (1, '{a:b}')",
    )
    scene.start()
    eventually(lambda: {one.table for one in told(scene.bridge)} == {"z"}, what="z is read")
    eventually(lambda: told(scene.bridge)[-1].refused, what="the other table is told")
    assert {*told(scene.bridge)[-1].refused} == {"public.progress", "public.unread"}
    assert "secret" not in scene.bridge.output
    scene.run(
        "CREATE SCHEMA other",
        "CREATE TABLE other.z (id int PRIMARY KEY, pairs text)",
        "CREATE TABLE transaction (id int PRIMARY KEY)",
        "INSERT INTO other.z VALUES (7)",
        "INSERT INTO transaction VALUES (7)",
        "INSERT INTO z VALUES (2, '{{c:d}}')",
        "INSERT INTO unread VALUES (2, 'b')",
        "UPDATE other.z SET id = 8",
        "TRUNCATE other.z, transaction",
    )
    scene.bridge.caught_up()
    scene.bridge.kill()
    scene.start()
    scene.run("INSERT INTO other.z VALUES (9)", "INSERT INTO z VALUES (3, NULL)")
    scene.bridge.caught_up()
    assert scene.bridge.stop() == 0, scene.bridge.output
    rows = [json.loads(value)["after"] for _, value in scene.bridge.records("z") if value]
    assert sorted(rows, key=itemgetter("id")) == [
        {"id": 1, "pairs": ["a", "b"]},
        {"id": 2, "pairs": [["c", "d"]]},
        {"id": 3, "pairs": None},
    ]
    parked = re.findall(r"a table is parked.* table=(\S+)", scene.bridge.output)
    assert {*parked} == {"other.z", "public.transaction"}
