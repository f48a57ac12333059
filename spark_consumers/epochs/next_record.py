"""Puts together the record of an epoch that its tables have: where each of them is as of it."""

from collections.abc import Mapping

from pyspark.sql import SparkSession

from spark_consumers.epochs.last_epoch import is_ahead
from spark_consumers.epochs.ledger import EpochRecord, ParkedTable, Place
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.staging import Adopted
from spark_consumers.iceberg.tables import State
from spark_consumers.kafka.reader import Offsets
from spark_consumers.kafka.transactions import Cut
from spark_consumers.liveness import tick


def next_record(
    spark: SparkSession,
    before: EpochRecord,
    epoch: int,
    cut: Cut,
    states: Mapping[str, State],
    adopted: Mapping[str, Adopted],
    parked: Mapping[str, ParkedTable],
    offsets: Offsets,
    topic_id: str,
) -> EpochRecord:
    """Return the record of the epoch after `before`, which has the number `epoch`.

    `states`: of all tables, as of the epoch. `offsets`: of the topics, where the next events are.
    `topic_id`: Kafka's id of the transaction topic. A table that the epoch did not touch stays
    where it was, unless it was made anew, or is redone, since.
    """
    places = {}
    for name in sorted(states.keys() - parked.keys()):
        state = states[name]
        place = before.tables.get(name)
        if name in adopted:
            place = Place(state.identifier, adopted[name].snapshot, state.uuid)
        elif not place or place.uuid != state.uuid or is_ahead(state, before):
            tick()
            table = catalog.load(spark, state.identifier)
            # A compaction since would be the last snapshot, which has no tag.
            tagged = catalog.ref_snapshot(table, catalog.tag_name(cut.commit_lsn))
            if tagged is None:
                tagged = catalog.ref_snapshot(table, catalog.tag_name(max(state.sealed[1], 0)))
            snapshot = catalog.snapshot_id(table) if tagged is None else tagged
            place = Place(state.identifier, snapshot, state.uuid)
        places[name] = place
    return EpochRecord(
        epoch,
        cut.commit_lsn,
        cut.ts_ms,
        offsets,
        cut.offset,
        places,
        topic_id,
        dict(parked),
    )
