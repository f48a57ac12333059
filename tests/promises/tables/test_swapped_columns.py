"""Names that columns of a real source take over from each other: each keeps its own values."""

import pytest

from tests.promises.tables.test_defaults import NAMES, Source, source

__all__ = ["source"]


@pytest.mark.long
def test_columns_that_take_over_the_names_of_others_keep_their_values(source: Source) -> None:
    for name in NAMES:
        source.run(f"ALTER TABLE {name} ADD price int, ADD price_new int, ADD d int")
    source.run(
        *(
            f"INSERT INTO {name} SELECT i, 'n', i, i * 100, i * 7 FROM generate_series(11, 15) i"
            for name in NAMES
        )
    )
    source.apply()
    assert source.differing() == []
    source.run(
        "ALTER TABLE items DROP price; ALTER TABLE items RENAME price_new TO price",
        "ALTER TABLE versions RENAME price TO x; ALTER TABLE versions RENAME price_new TO price;"
        "ALTER TABLE versions RENAME x TO price_new",
        "ALTER TABLE plain DROP price; ALTER TABLE plain ADD price int DEFAULT 77",
        *(f"INSERT INTO {name} (id, price, d) VALUES (21, 5, 6)" for name in NAMES),
    )
    source.apply()
    assert source.differing() == []
    # In two steps, so that the Iceberg table still has the dropped column.
    source.run(
        "ALTER TABLE items DROP d",
        "INSERT INTO items (id, price) VALUES (22, 7)",
        "ALTER TABLE items RENAME price TO d",
        "INSERT INTO items (id, d) VALUES (23, 8)",
        # The last column, and another one of its name, type and place.
        "ALTER TABLE plain DROP price; ALTER TABLE plain ADD price int DEFAULT 78",
        "INSERT INTO plain (id, d) VALUES (23, 8)",
    )
    source.apply()
    assert source.pipeline.runner.parking.tables == {}
    assert source.differing() == []
    source.pipeline.restart()
    source.run("UPDATE items SET d = d + 1", "UPDATE versions SET d = d + 1 WHERE id > 12")
    source.apply()
    assert source.differing() == []
