"""The rows of an Iceberg table as of a snapshot: their hashes, and the rows of some buckets."""

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_consumers.audit.audited_table import AuditedTable
from spark_consumers.audit.report import Difference
from spark_consumers.iceberg import catalog
from spark_consumers.sql import quoted
from spark_consumers.verify import hashes
from spark_consumers.verify.comparison import KINDS


class TableRows:
    """The columns c0, c1 and so on of an Iceberg table, and the bucket of each row."""

    def __init__(
        self,
        spark: SparkSession,
        identifier: str,
        snapshot: int,
        table: AuditedTable,
        buckets: hashes.Buckets,
    ) -> None:
        names = [quoted(field.name) for field in table.fields]
        self._rows = (
            catalog.as_of(spark, identifier, snapshot)
            .where(table.condition)
            .selectExpr(*(f"{name} AS c{number}" for number, name in enumerate(names)))
        )
        kinds = [field.dataType for field in self._rows.schema.fields]
        self._texts = [hashes.table_text(f"c{n}", kind) for n, kind in enumerate(kinds)]
        self._bucket = hashes.table_bucket(
            [self._texts[place] for place in buckets.places], buckets.number
        )

    def buckets(self) -> dict[int, tuple[int, int]]:
        """Return bucket -> number of rows, sum of hashes: one Spark job."""
        hashed = self._rows.selectExpr(
            f"{self._bucket} AS b", f"{hashes.table_hash(self._texts)} AS h"
        )
        found = hashed.groupBy("b").agg(F.count("*").alias("n"), F.sum("h").alias("h")).collect()
        return {row["b"]: (row["n"], int(row["h"])) for row in found}

    def of(self, buckets: Sequence[int]) -> DataFrame:
        """Return the rows of some buckets."""
        return self._rows.where(f"{self._bucket} IN ({', '.join(map(str, buckets))})")


def differing_rows(
    groups: DataFrame,
    left: DataFrame,
    right: DataFrame,
    names: Sequence[str],
    key: Sequence[int],
    *,
    limit: int,
    kinds: Sequence[str] = KINDS,
) -> tuple[Difference, ...]:
    """Return up to `limit` rows that differ in one of `kinds`, each with the columns that do.

    `groups` counts the rows of each key by kind; `left` and `right` have the columns c0, c1 and so
    on, `names` are theirs.
    """
    kind = reduce(
        lambda rest, one: F.when(F.col(one) > 0, F.lit(one)).otherwise(rest),
        kinds,
        F.lit(None).cast("string"),
    )
    identity = [name for name in groups.columns if name.startswith("c")]
    found = groups.withColumn("kind", kind).where("kind IS NOT NULL").limit(limit)
    if not key:
        return tuple(
            Difference(row["kind"], row["key"])
            for row in found.select("kind", _json(identity, names).alias("key")).collect()
        )
    others = [n for n in range(len(names)) if n not in key]
    pairs = found.select("kind", *identity)
    for side, rows in (("s", left), ("t", right)):
        renamed = [
            F.col(f"c{n}").alias(f"{side}{n}" if n in others else f"c{n}")
            for n in range(len(names))
        ]
        pairs = pairs.join(rows.select(*renamed), identity, "left")
    unequal = [F.when(~F.col(f"s{n}").eqNullSafe(F.col(f"t{n}")), F.lit(names[n])) for n in others]
    columns = F.array_compact(F.array(*unequal)) if unequal else F.array().cast("array<string>")
    columns_of_keys = pairs.select(
        "kind", _json(identity, names).alias("key"), columns.alias("columns")
    )
    merged = columns_of_keys.groupBy("kind", "key").agg(
        F.array_sort(F.array_distinct(F.flatten(F.collect_list("columns")))).alias("columns")
    )
    return tuple(
        Difference(
            row["kind"], row["key"], tuple(row["columns"]) if row["kind"] == "different" else ()
        )
        for row in merged.orderBy("kind", "key").collect()
    )


def _json(identity: Sequence[str], names: Sequence[str]) -> Column:
    values = F.struct(*(F.col(name).alias(names[int(name[1:])]) for name in identity))
    return F.to_json(values, {"ignoreNullFields": "false"})
