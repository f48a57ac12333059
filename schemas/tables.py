"""The settings of the section `tables`: which Iceberg tables there are, of what kind, and where.

A table pattern is `schema.table`, a column pattern a name; in both `*` stands for any characters.
"""

import re
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from schemas.naming import Naming, schema_and_table
from schemas.shaping import ColumnPattern, TablePattern

Kind = Literal["current", "history", "changelog"]
CatalogType = Literal["jdbc", "rest", "hive", "glue", "nessie", "custom"]
Milliseconds = Annotated[int, Field(gt=0, le=24 * 3600 * 1000)]
_TRANSFORM: Final = re.compile(r"(?:(\w+)\()?(?:(\d+)\s*,\s*)?([^(),]+?)\)?")
_NUMBERED: Final = ("bucket", "truncate")
_TIMED: Final = ("year", "month", "day", "hour")
_SORT: Final = re.compile(r"(.+?)(?: (asc|desc))?", re.IGNORECASE)


FILE_IO: Final = {
    "s3": "org.apache.iceberg.aws.s3.S3FileIO",
    "s3a": "org.apache.iceberg.aws.s3.S3FileIO",
    "gs": "org.apache.iceberg.gcp.gcs.GCSFileIO",
    "abfs": "org.apache.iceberg.azure.adlsv2.ADLSFileIO",
    "abfss": "org.apache.iceberg.azure.adlsv2.ADLSFileIO",
    "wasb": "org.apache.iceberg.azure.adlsv2.ADLSFileIO",
    "wasbs": "org.apache.iceberg.azure.adlsv2.ADLSFileIO",
    "hdfs": "org.apache.iceberg.hadoop.HadoopFileIO",
}
"""Scheme of a warehouse -> the class that reads and writes its files (Iceberg documentation, "AWS",
"GCS", "Azure", "Java Custom Catalog")."""


class Transform(NamedTuple):
    """A partition field: `name` is empty for the column's own value, `number` 0 for none."""

    name: str
    number: int
    column: str


def transform(text: str) -> Transform:
    """Read `column`, `day(column)` or `bucket(16, column)`. Raise ValueError for anything else."""
    match = _TRANSFORM.fullmatch(text.strip())
    if match is None or (match[1] is None) != (not text.strip().endswith(")")):
        raise ValueError(
            f"{text!r} is not a partition field; write it as `day(at)` or `bucket(16, id)`"
        )
    name, number, column = (match[1] or "").lower(), int(match[2] or 0), match[3].strip()
    if name and name not in (*_NUMBERED, *_TIMED):
        raise ValueError(f"{text!r}: {name} is not a partition transform")
    if (name in _NUMBERED) != (number > 0):
        raise ValueError(f"{text!r}: bucket and truncate take a number, the others none")
    return Transform(name, number, column)


def sort_field(text: str) -> tuple[str, str]:
    """Read `column`, `column asc` or `column desc`: (column, ASC or DESC)."""
    match = _SORT.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a sort field; write it as `column`, `column asc` or `column desc`"
        )
    return match[1], (match[2] or "asc").upper()


def _is_transform(text: str) -> str:
    transform(text)
    return text


def _is_sort(text: str) -> str:
    sort_field(text)
    return text


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TableRule(_Part):
    """How one source table is kept. Columns of `partition` and `sort` are the Iceberg table's."""

    kind: Kind = "current"
    """`current`: one row per key; `history`: one per version of a row (SCD type 2); `changelog`:
    one per event."""
    include: tuple[ColumnPattern, ...] = ()
    """Columns; empty: all that `exclude` does not name. A key's columns can't be left out."""
    exclude: tuple[ColumnPattern, ...] = ()
    """Columns that the Iceberg table lacks."""
    rename: dict[str, str] = {}
    """Source column -> column of the Iceberg table."""
    partition: tuple[Annotated[str, AfterValidator(_is_transform)], ...] = ()
    """`column`, `year|month|day(column)`, `bucket(16, column)`, `truncate(4, column)`; `hour` of
    `_commit_time` and `_valid_from`, as a column of the source may hold infinity."""
    sort: tuple[Annotated[str, AfterValidator(_is_sort)], ...] = ()
    """`column` or `column desc`: the order within files."""
    properties: dict[str, str] = {}
    """Iceberg table properties, when the table is made; format-version is 2 or 3."""

    @model_validator(mode="after")
    def _distinct(self) -> "TableRule":
        """Refuse two columns of one name, and Iceberg formats without row deletes."""
        names = list(self.rename.values())
        if len(set(names)) != len(names):
            raise ValueError("rename: two columns get one name")
        if self.properties.get("format-version", "3") not in ("2", "3"):
            raise ValueError("properties: format-version is 2 or 3, as 1 has no row deletes")
        return self


class SumSettings(_Part):
    """A table of sums, kept up to date from the changes of one source table."""

    source: TablePattern
    """`schema.table` of a followed table of kind `current`, or without key."""
    group_by: tuple[str, ...] = Field(min_length=1)
    """Columns of `source` that the rows are grouped by, as named in the Iceberg table."""
    sums: dict[str, str] = Field(min_length=1)
    """Column of the table of sums -> column of `source` that it sums."""


def _is_warehouse(value: str | Path) -> str:
    """Return a URI of object storage as it is, and a folder or `file:` URI as an absolute path.

    Raise ValueError for a scheme that no FileIO of Iceberg is known for: as a path it would
    silently become a folder of this machine.
    """
    text = str(value)
    scheme, separator, rest = text.partition(":/")
    if not separator or "/" in scheme:
        return str(Path(text).resolve())
    if scheme == "file":
        return str(Path("/" + rest.lstrip("/")).resolve())
    if scheme not in FILE_IO or not rest.strip("/"):
        raise ValueError(
            "it is not a warehouse; write a folder, or a URI such as s3://bucket/folder "
            f"({', '.join(f'{known}://' for known in ('file', *FILE_IO))})"
        )
    return text.rstrip("/")


class TablesSettings(_Part):
    """Where the Iceberg tables are, what they are like, and how the stream is cut."""

    warehouse: Annotated[str, BeforeValidator(_is_warehouse)]
    """Folder or URI (s3://bucket/folder, gs://, abfss://, hdfs://) below which the tables' files
    are."""
    catalog_type: CatalogType = "jdbc"
    """Kind of the Iceberg catalog; custom: the class in catalog_options.catalog-impl."""
    catalog_uri: str = ""
    """URI of the Iceberg catalog: JDBC, REST, Hive's metastore or Nessie; empty with jdbc: an
    SQLite file in the warehouse, which must be a folder then."""
    catalog_options: dict[str, str] = Field({}, repr=False)
    """More properties of the Iceberg catalog and its FileIO: jdbc.user, jdbc.password, token,
    credential, warehouse (of a REST catalog), s3.endpoint, client.region …"""
    namespace: str = Field("", pattern=r"^[A-Za-z0-9_]*$")
    """Iceberg namespace; empty: the topic prefix with `.` and `-` as `_`."""
    tables: tuple[str, ...] = ()
    """Source tables (`schema.table`) to follow; empty: every table that the bridge has
    published."""
    rules: dict[TablePattern, TableRule] = {}
    """Pattern of source tables -> how their Iceberg tables are made; the first match applies.
    Without a match: kind `current`, all columns."""
    sums: dict[str, SumSettings] = {}
    """Iceberg table -> what it sums."""
    on_bad_event: Literal["park", "quarantine"] = "park"
    """What to do with an event that can't be read, whose value does not fit, or that Kafka has
    refused (a dead letter). `park`: the table stays at its last epoch, and the others go on;
    `quarantine`: put the event into the table `_quarantine` (a dead letter is nowhere), continue
    without it, and mark the table as incomplete."""
    on_column_default: Literal["fill", "null"] = "fill"
    """What to do in the rows that are there when a column with a default is added at the source:
    fill the column with the value that they have there, which writes the Iceberg table anew, or
    leave NULL and log it."""
    on_dropped_column: Literal["keep", "drop"] = "keep"
    """What to do with a column dropped at the source: keep it, with NULL in new rows, or drop it
    in the commit that brings the next epoch."""
    on_changed_type: Literal["park", "new_column"] = "park"
    """What to do when a column's new type can't hold its old values: park the table, or keep these
    values in `column__old<n>`."""
    trigger_interval_ms: Milliseconds = 500
    """Shortest time between the beginnings of two epochs, and how often an idle query looks for
    transactions: its trigger (processingTime). An epoch that takes longer is followed at once."""
    transaction_offsets_per_trigger_max: int = Field(60_000, ge=1)
    """Most offsets of `<prefix>.transaction` in one micro-batch (maxOffsetsPerTrigger). A
    transaction has two or three."""
    checkpoint_location: str = ""
    """Folder or URI with the streaming query's checkpoint; empty: `_checkpoints` in the warehouse.
    Losing it is harmless: the tables record where to continue."""
    offsets_per_trigger_max: int = Field(200_000, ge=1)
    """Most events of an epoch. A transaction is never split: a larger one is an epoch of its
    own."""
    epochs_kept: int = Field(300, ge=2, le=100_000)
    """Most epochs that stay recorded, and so readable. By their age fewer stay (the next three
    settings, which 3,000 epochs satisfy at all times). Each commit to a table writes some 1 kB for
    each of them anew. A table keeps as many tags, at most, that no recorded epoch names."""
    epochs_kept_all_ms: int = Field(15 * 60_000, ge=0)
    """Epochs up to this age all stay readable."""
    epochs_kept_minutely_ms: int = Field(24 * 3600_000, ge=0)
    """Of epochs up to this age, the last of each minute stays readable."""
    epochs_kept_hourly_ms: int = Field(30 * 24 * 3600_000, ge=0)
    """Of epochs up to this age, the last of each hour stays readable; older ones do not."""
    maintenance_interval_ms: int = Field(600_000, ge=0, le=7 * 24 * 3600 * 1000)
    """How often `run` compacts tables and expires snapshots; 0: never."""
    compact_files_min: int = Field(12, ge=2)
    """A table (or partition) is compacted once at least this many files can be put together."""
    key_index: bool = False
    """Index the keys of tables of more than 5,000,000 rows, too, and use the index in large epochs:
    what an epoch costs then does not grow with the table. Indexes are kept in the warehouse's
    folder, or in this machine's folder for temporary files: 16 bytes a row, and its key's bytes
    unless that is one integer."""
    orphans_older_ms: int = Field(24 * 3600 * 1000, ge=3600 * 1000)
    """`maintain` removes files that no snapshot names once they are older than this; at least an
    hour, as no snapshot names the files of an epoch under way. Keep it longer than an epoch
    takes."""
    audit_interval_ms: int = Field(0, ge=0, le=7 * 24 * 3600 * 1000)
    """How often `run` audits all tables beside its epochs, as `slottables audit` does; 0: never. It
    needs the section `source`."""
    audit_deadline_ms: int = Field(60_000, ge=1_000, le=3600_000)
    """Longest time that an audit waits for transactions that are open at the source, and then for
    the epoch of its snapshot. After that the tables are not judged."""
    audit_busy_percent: float = Field(3.0, gt=0, le=100)
    """Share of its time that an audit lets the source work, on one connection. It pauses for the
    rest, and its database snapshot stays open for longer."""
    http_host: str = "127.0.0.1"
    """Address that the HTTP server listens on; 0.0.0.0 lets other machines reach it."""
    http_port: int | None = Field(None, ge=0, le=65535)
    """Port of /metrics, which `slottables status` asks, too, /healthz, /readyz and /v1/wait; unset:
    off; 0: a free port, which the log names."""
    progress_deadline_ms: int = Field(900_000, ge=0, le=24 * 3600 * 1000)
    """Longest time, beyond trigger_interval_ms, in which nothing is seen of the streaming query's
    work before /healthz answers 503; 0: never. An epoch counts as work for as long as tasks of
    Spark end, read or write rows."""
    openlineage: bool = False
    """Send START and COMPLETE of each epoch of a table to OpenLineage (docs/guides/tracing.md).
    Needs the extra `openlineage`, which the images have."""
    driver_memory: str = Field("2g", pattern=r"^[0-9]+[mg]$")
    """Memory of Spark's JVM."""
    spark_options: dict[str, str] = {}
    """Options of the Spark session, such as spark.jars."""

    @property
    def warehouse_folder(self) -> Path | None:
        """The warehouse's folder on this machine; None for a warehouse in object storage."""
        return Path(self.warehouse) if self.warehouse.startswith("/") else None

    @property
    def file_io(self) -> str:
        """The class of Iceberg that reads and writes the warehouse's files."""
        return FILE_IO["hdfs" if self.warehouse_folder else self.warehouse.partition(":")[0]]

    def follows(self, name: str, naming: Naming) -> bool:
        """Tell whether there is an Iceberg table of the source table `name` (`schema.table`)."""
        return name in self.tables if self.tables else naming.publishes(*schema_and_table(name))

    @model_validator(mode="after")
    def _has_a_catalog(self) -> "TablesSettings":
        """Require the URI or implementation that the kind of catalog needs."""
        needed = {"jdbc": not self.warehouse_folder, "rest": True, "hive": True, "nessie": True}
        if needed.get(self.catalog_type) and not self.catalog_uri:
            raise ValueError(
                f"catalog_uri is needed with catalog_type {self.catalog_type}"
                + (" and a warehouse that is not a folder" if self.catalog_type == "jdbc" else "")
            )
        if (self.catalog_type == "custom") != ("catalog-impl" in self.catalog_options):
            raise ValueError("catalog_type custom and catalog_options.catalog-impl belong together")
        return self
