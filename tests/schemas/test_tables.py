"""The settings of tables: rules that say what they mean, and errors for those that don't."""

from pathlib import Path

import pytest

from schemas.errors import SettingsError
from schemas.settings import load_settings
from schemas.tables import TableRule, Transform, sort_field, transform


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("region", Transform("", 0, "region")),
        ("Days(at)", None),
        ("day(at)", Transform("day", 0, "at")),
        ("bucket(16, id)", Transform("bucket", 16, "id")),
        ("truncate(4,name)", Transform("truncate", 4, "name")),
        ("bucket(id)", None),
        ("bucket(0, id)", None),
        ("day(3, at)", None),
        ("day(at", None),
        ("at)", None),
        ("zorder(at)", None),
        ("", None),
    ],
)
def test_partition_fields(text: str, expected: Transform | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match=r"partition field|transform|number"):
            transform(text)
    else:
        assert transform(text) == expected


def test_sort_fields() -> None:
    assert sort_field("id") == ("id", "ASC")
    assert sort_field("Ordered at DESC") == ("Ordered at", "DESC")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("{kind: mirror}", "kind"),
        ("{partition: ['day(at']}", "partition"),
        ("{rename: {a: x, b: x}}", "two columns get one name"),
        ("{colums: [a]}", "unknown key"),
    ],
)
def test_a_rule_that_means_nothing_is_one_clear_error(
    tmp_path: Path, rule: str, expected: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"tables: {{warehouse: /w, rules: {{public.t: {rule}}}}}", encoding="utf-8")
    with pytest.raises(SettingsError, match=expected):
        load_settings(path)


def test_a_rule_without_anything_is_a_current_table() -> None:
    assert TableRule() == TableRule(kind="current")
