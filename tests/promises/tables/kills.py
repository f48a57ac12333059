"""Kills a pipeline while it publishes an epoch, with a catalog that commits table by table."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest
from pyspark.sql import SparkSession

from spark_consumers.epochs import publication
from spark_consumers.epochs.publication import TableCommit

Seam = Literal["nothing", "tables", "all"]
SEAMS: tuple[Seam, ...] = ("nothing", "tables", "all")
"""What the catalog has of the epoch when the pipeline is killed; "tables": all but the record."""
PUBLISH = "spark_consumers.epochs.epoch_runner.publish"


def kill(
    patch: pytest.MonkeyPatch,
    has: Seam,
    death: type[BaseException] = KeyboardInterrupt,
    *,
    tables_max: int | None = None,
) -> None:
    """Let the next epoch's publication end in a death, once the catalog `has` so much of it.

    `tables_max`: only so many tables of it, by their names.
    """

    def publish(_spark: SparkSession, tables: Sequence[TableCommit], *record: Any) -> bool:
        first = sorted(tables, key=lambda change: change.identifier)[:tables_max]
        assert has == "nothing" or publication.each_alone(first)
        assert has != "all" or publication.one_by_one([], *record)
        raise death

    patch.setattr(PUBLISH, publish)
