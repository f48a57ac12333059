"""Whether `slottables verify` compares with the server whose events Kafka has; without Spark."""

import json
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from psycopg import sql

from schemas.events import ProgressRecord, progress_topic
from schemas.settings import KafkaSettings, SourceSettings
from spark_consumers.verify import postgres
from spark_consumers.verify.comparison import TableComparison, verified, verify_lines
from spark_consumers.verify.source_identity import SourceIdentity, not_judged, source_not_judged
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually

RECORD = ProgressRecord(
    slot="s",
    system_identifier="7",
    timeline=3,
    commit_lsn=900,
    end_lsn=900,
    seq=0,
    ts_ms=0,
    publication_oid=55,
)
SAME = SourceIdentity("7", standby=False, timeline=3, publication_oid=55)


@pytest.mark.parametrize(
    ("identity", "expected"),
    [
        (SAME, ""),
        (SAME._replace(standby=True), ""),
        (SAME._replace(system_identifier="8"), "another system identifier"),
        (SAME._replace(timeline=2), "timeline 2, and Kafka's events are of timeline 3"),
        (SAME._replace(timeline=4), "timeline 4, and Kafka's events are of timeline 3"),
        (SAME._replace(standby=True, timeline=2), "receives timeline 2"),
        (SAME._replace(standby=True, timeline=None), "pg_read_all_stats"),
        (SAME._replace(publication_oid=None), "lacks the publication"),
        (SAME._replace(publication_oid=56), "lacks the publication"),
    ],
)
def test_a_source_that_is_not_the_one_of_the_events_is_not_judged(
    identity: SourceIdentity, expected: str
) -> None:
    found = not_judged(RECORD, identity)
    assert expected in found and bool(found) is bool(expected)


def test_a_record_of_an_earlier_release_tells_no_publication() -> None:
    record = RECORD.model_copy(update={"publication_oid": 0})
    assert not_judged(record, SAME._replace(publication_oid=None)) == ""


def test_rows_that_are_equal_to_those_of_an_unknown_source_are_not_equal() -> None:
    one = TableComparison("public.t", "t", 3, 3, 0, 0, 0)
    assert one.equal and verified([one]) == 0
    unknown = TableComparison("public.t", "t", 3, 3, 0, 0, 0, source_not_judged="why")
    assert not unknown.equal and verified([unknown]) == 1
    assert list(verify_lines([unknown], as_json=False)) == [
        "the source is not judged: why",
        "public.t: equal, the source is not judged (3 rows at the source, 3 in the table)",
    ]
    (text,) = verify_lines([unknown], as_json=True)
    told = json.loads(text)
    assert (told["equal"], told["source_not_judged"]) == (False, "why")
    assert told["tables"][0]["equal"] is False


def test_real_servers_are_judged(
    pair: Provider, fresh_database: str, kafka: Broker, topic_prefix: str
) -> None:
    primary, standby = (s.conninfo(fresh_database) for s in (pair.primary, pair.standby))
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})

    def tell(**values: Any) -> None:
        told = record.model_copy(update=values)
        producer.produce(progress_topic(topic_prefix), told.model_dump_json(), told.slot)
        assert producer.flush(30) == 0

    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix)

    def judged(conninfo: str, slot: str = "s") -> str:
        source = SourceSettings.model_validate(
            {"conninfo": conninfo, "publication": "own", "slot": slot}
        )
        with postgres.snapshot(source) as connection:
            found = source_not_judged(connection, source, settings)
            assert connection.execute("SELECT 1").fetchone() == (1,)
        return found

    with psycopg.connect(primary, autocommit=True) as connection:
        connection.execute("CREATE PUBLICATION own")
        row = connection.execute(
            "SELECT system_identifier::text, timeline_id, (SELECT oid::int8 FROM pg_publication)"
            " FROM pg_control_system(), pg_control_checkpoint()"
        ).fetchone()
        assert row is not None
        given = {"system_identifier": row[0], "timeline": row[1], "publication_oid": row[2]}
        record = RECORD.model_copy(update=given)
        assert "not a progress record of the slot" in judged(primary)
        name = progress_topic(topic_prefix)
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        admin.create_topics([NewTopic(name, 1, 1)])[name].result(30)
        tell()
        tell(slot="foreign", system_identifier="1")
        assert judged(primary) == ""
        assert "another system identifier" in judged(primary, "foreign")
        assert "not a progress record of the slot" in judged(primary, "of_nobody")
        eventually(lambda: judged(standby) == "", what="the standby has the publication")
        role = sql.Identifier(f"blind_{fresh_database}")
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
        try:
            blind = psycopg.conninfo.make_conninfo(standby, user=role._obj[0])
            eventually(
                lambda: "pg_read_all_stats" in judged(blind), what="the standby has the role"
            )
        finally:
            connection.execute(sql.SQL("DROP ROLE {}").format(role))
        tell(timeline=given["timeline"] + 1)
        for conninfo in (primary, standby):
            assert f"timeline {given['timeline']}" in judged(conninfo)
