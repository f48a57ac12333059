"""What a rule, or a column's name, is refused for: pure."""

from typing import Any

import pytest

from schemas.errors import SettingsError
from schemas.tables import TablesSettings
from spark_consumers.events.columns import ColumnShape
from spark_consumers.events.shape import Shape
from spark_consumers.iceberg.layout import Layout, layout_of

COLUMNS = (("id", "int4"), ("at", "timestamp"), ("instant", "timestamptz"))


def layout(rule: dict[str, Any], *more: tuple[str, str]) -> Layout:
    columns = tuple(ColumnShape(n, kind, -1, key=n == "id") for n, kind in (*COLUMNS, *more))
    settings = TablesSettings.model_validate({"warehouse": "/w", "rules": {"*.*": rule}})
    return layout_of(settings, Shape("public", "t", columns, ("id",)))


@pytest.mark.parametrize("column", ["at", "instant"])
def test_an_hour_of_a_column_that_may_hold_infinity_is_refused(column: str) -> None:
    with pytest.raises(SettingsError, match=f"column {column} may hold infinity"):
        layout({"partition": [f"hour({column})"]})
    assert layout({"partition": [f"day({column})"]})
    assert layout({"kind": "changelog", "partition": ["hour(_commit_time)"]})
    assert layout({"kind": "history", "partition": ["hour(_valid_from)"]})


@pytest.mark.parametrize("name", ["_pos", "__row_from_source", "_commit_lsn"])
def test_a_name_that_a_merge_needs_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"column {name} has a name that .* rename it"):
        layout({}, (name, "text"))
    assert layout({"rename": {name: "renamed"}}, (name, "text"))
