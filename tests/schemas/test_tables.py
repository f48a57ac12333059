"""The settings of tables: rules that say what they mean, and errors for those that don't."""

from pathlib import Path

import pytest

from schemas.errors import SettingsError
from schemas.settings import load_settings
from schemas.tables import TableRule, TablesSettings, Transform, sort_field, transform


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


@pytest.mark.parametrize(
    ("given", "warehouse", "file_io"),
    [
        ("/data/../w", "/w", "HadoopFileIO"),
        ("file:///w", "/w", "HadoopFileIO"),
        ("s3://bucket/tables/", "s3://bucket/tables", "S3FileIO"),
        ("gs://bucket", "gs://bucket", "GCSFileIO"),
        ("abfss://box@account.dfs.core.windows.net/w", None, "ADLSFileIO"),
        ("hdfs://name/w", None, "HadoopFileIO"),
    ],
)
def test_a_warehouse_is_a_folder_or_a_uri(given: str, warehouse: str | None, file_io: str) -> None:
    found = TablesSettings(warehouse=given, catalog_uri="jdbc:postgresql://db/catalog")
    assert found.warehouse == (warehouse or given)
    assert found.file_io.endswith(f".{file_io}")
    assert (found.warehouse_folder is None) == ("://" in found.warehouse)


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ("{warehouse: 's4://bucket/w'}", "is not a warehouse"),
        ("{warehouse: 's3://'}", "is not a warehouse"),
        ("{warehouse: 's3://bucket/w'}", "catalog_uri is needed with catalog_type jdbc"),
        ("{warehouse: /w, catalog_type: nessie}", "catalog_uri is needed with catalog_type nessie"),
        ("{warehouse: /w, catalog_type: custom}", "catalog-impl belong together"),
        ("{warehouse: /w, catalog_options: {catalog-impl: x.Y}}", "catalog-impl belong together"),
        (
            "{warehouse: /w, rules: {a.b: {properties: {format-version: '1'}}}}",
            "format-version is 2 or 3",
        ),
    ],
)
def test_a_warehouse_or_catalog_that_means_nothing_is_one_clear_error(
    tmp_path: Path, tables: str, expected: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"tables: {tables}", encoding="utf-8")
    with pytest.raises(SettingsError, match=expected):
        load_settings(path)


def test_a_rule_without_anything_is_a_current_table() -> None:
    assert TableRule() == TableRule(kind="current")


def test_files_of_an_epoch_under_way_are_not_taken_for_lost_ones(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("tables: {warehouse: /w, orphans_older_ms: 3599999}", encoding="utf-8")
    with pytest.raises(SettingsError, match="orphans_older_ms"):
        load_settings(path)
