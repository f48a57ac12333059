"""Whether a table's part of an epoch is applied in the driver, or by Spark, and why. Pure."""

from typing import Final

from spark_consumers.apply.data_file import FORMAT
from spark_consumers.apply.look import Look
from spark_consumers.epochs.topic_summary import TopicSummary
from spark_consumers.iceberg.tables import OpenTable
from spark_consumers.key_index.keys import is_indexable

ROWS_MAX: Final = 5_000_000
"""Rows of a table whose keys are indexed without `tables.key_index`: 16 bytes each."""
_VECTORS_SINCE: Final = 3


def by_spark(
    table: OpenTable,
    summary: TopicSummary,
    look: Look,
    *,
    unread: str,
    shapes: int,
    summed: bool,
    indexed: bool,
) -> str:
    """Return why Spark applies a table's part of an epoch; empty: the driver does it itself.

    `unread`: why the driver has not read the events; `shapes`: how many shapes they have; `summed`:
    whether a table of sums follows this one; `indexed`: `tables.key_index`.
    """
    layout = table.layout
    keyless = layout.shape.keyless
    kinds = [field.type.simpleString() for field in layout.key]
    found = {
        unread: bool(unread),
        f"kind {layout.kind}": layout.kind != "current",
        "rows are replaced": bool(
            table.rebuild or table.rebuilt or table.replaced or summary.truncates
        ),
        "columns change": shapes > 1 or bool(table.fills or table.drops),
        "unchanged values": summary.unavailable,
        "sums": summed,
        "format version 2": look.format < _VECTORS_SINCE and not keyless,
        "partitions": look.partitioned,
        "sorted files": look.sorted,
        "another file format": look.properties.get(FORMAT, "parquet").lower() != "parquet",
        "a key of another type": not keyless and not is_indexable(kinds),
        "a large table": not keyless and not indexed and look.rows > ROWS_MAX,
    }
    return next((reason for reason, holds in found.items() if holds), "")
