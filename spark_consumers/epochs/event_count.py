"""The tables whose events nobody counts, where an epoch's transactions count those of the others.

Reading begins at the first transaction that Kafka has, where no record of epochs tells which one is
next. Kafka may have deleted others that came before, or have another topic of that name: what the
rest counts is not the whole then. Nor is it for a table that the settings left out for some epochs:
the transactions of these were read without it.
"""

from collections.abc import Mapping

import structlog
from pyspark.sql import SparkSession

from spark_consumers.epochs.ledger import EpochRecord
from spark_consumers.epochs.parking import Parking
from spark_consumers.iceberg.tables import NEVER, OpenTable
from spark_consumers.kafka.transaction_topic import TransactionTopic

log = structlog.get_logger()


def uncounted(
    spark: SparkSession,
    topic: TransactionTopic,
    record: EpochRecord,
    opened: Mapping[str, OpenTable],
    parking: Parking,
) -> set[str]:
    """Return the tables that an epoch after `record` brings events, but may lack some of them.

    These are parked ones that return without a count, tables that the settings left out, and tables
    at a commit LSN whose next transactions Kafka does not have. Tables that are made from Kafka's
    first event on are only named in the log, where Kafka has deleted transactions: what their
    topics have is there.
    """
    found = parking.uncounted() | _left_out(record, opened, parking)
    if record.transaction_offset is not None:
        return found
    whole = topic.first() == 0
    read = {name: table for name, table in opened.items() if table.commit_lsn != NEVER}
    if whole and not read:
        return found
    oldest_lsn = topic.oldest_lsn(spark)
    judged = read if whole else opened
    lacking = {name for name, table in judged.items() if table.commit_lsn < oldest_lsn}
    if lacking:
        log.warning(
            "not judged: whether Kafka has all events that the tables lack, as it does not have "
            "the transactions that count them",
            topic=topic.name,
            tables=", ".join(sorted(lacking)),
        )
    return found | {name for name in lacking if opened[name].commit_lsn != NEVER}


def _left_out(record: EpochRecord, opened: Mapping[str, OpenTable], parking: Parking) -> set[str]:
    """Return the tables that lack epochs which the record does not say that they have."""
    # An earlier version has recorded tables without their uuid: their epochs were counted.
    counted = {name for name, place in record.tables.items() if not place.uuid}
    counted |= parking.tables.keys()
    found = {
        name
        for name, table in opened.items()
        if NEVER < table.commit_lsn < record.commit_lsn and not table.rebuilt
    } - counted
    if found:
        log.warning(
            "not judged: whether Kafka has all events of tables that the settings left out, as the "
            "epochs since did not count them",
            tables=", ".join(sorted(found)),
        )
    return found
