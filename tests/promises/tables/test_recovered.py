"""`slotbridge recover` repairs topics in place; the tables that follow them need nothing else."""

import psycopg
import pytest
from confluent_kafka import OFFSET_END, TopicPartition
from confluent_kafka.admin import AdminClient

from spark_consumers.verify.comparison import verify_tables
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.recover_process import change_unseen, drop_slot, fill, recovered, touch
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import patient


def assert_equal(pipeline: Pipeline, rows: int) -> None:
    """After what Kafka has by now, `t` and `other` are those of the source."""
    pipeline.stream()
    found = verify_tables(pipeline.spark, pipeline.settings)
    assert all(one.equal for one in found), [one.line() for one in found]
    assert {one.table: one.table_rows for one in found} == {"public.t": rows, "public.other": 3}


@pytest.mark.long
def test_tables_follow_a_repair(
    pair: Provider,
    fresh_database: str,
    kafka: Broker,
    topic_prefix: str,
    new_bridge: NewBridge,
    new_pipeline: NewPipeline,
) -> None:
    """A slot that is gone; a topic without its first events, and a key that is renamed; topics that
    differ in nothing."""
    conninfo = pair.primary.conninfo(fresh_database)
    bridge = new_bridge(conninfo)
    pipeline = new_pipeline(conninfo, publication=bridge.publication, slot=bridge.slot)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        bridge.start().streaming()
        fill(connection)
        connection.execute("CREATE TABLE other (id int PRIMARY KEY, at timestamptz)")
        connection.execute("INSERT INTO other SELECT g, now() FROM generate_series(1, 3) g")
        touch(connection)
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        assert_equal(pipeline, 290)

        drop_slot(connection, bridge.slot)
        change_unseen(connection)
        connection.execute("ALTER TABLE other ADD COLUMN more int DEFAULT 7")
        recovered(bridge)
        assert_equal(pipeline, 290)

        bridge.start().streaming()
        connection.execute("UPDATE t SET note = 'later' WHERE id BETWEEN 1 AND 40")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        assert_equal(pipeline, 290)

        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        topic = f"{topic_prefix}.public.t"
        ends = [TopicPartition(topic, partition, OFFSET_END) for partition in range(2)]
        for future in admin.delete_records(ends).values():
            future.result(patient(30))
        drop_slot(connection, bridge.slot)
        connection.execute("DELETE FROM t WHERE id = 2")
        connection.execute("ALTER TABLE other RENAME id TO number")
        done = recovered(bridge).tables["public.t"]
        assert done.emptied and done.created == 289
        assert_equal(pipeline, 289)

        done = recovered(bridge, "--force").tables["public.other"]
        assert (done.created, done.updated, done.deleted) == (0, 0, 0)
        bridge.start().streaming()
        connection.execute("DELETE FROM t WHERE id = 3")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        assert_equal(pipeline, 288)
