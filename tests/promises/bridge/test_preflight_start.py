"""`slotbridge preflight`: what a start needs is named before it, and nothing is left behind."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from confluent_kafka.admin import AdminClient
from psycopg import sql

from services.testbed.ports import free_port
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_preflight import Examined
from tests.providers.interface import Broker, Provider
from tests.providers.registry import Registry
from tests.providers.roles import make_roles
from tests.providers.waiting import patient

KAFKAS_OWN = "__consumer_offsets"
"""Kafka makes it when somebody first asks for a group."""


def add(bridge: Bridge, **sections: Any) -> None:
    """Add sections to the bridge's settings."""
    document = yaml.safe_load(bridge.config.read_text(encoding="utf-8"))
    bridge.config.write_text(yaml.safe_dump({**document, **sections}), encoding="utf-8")


def refused_by(found: Examined) -> set[str]:
    """The findings that keep the bridge from starting."""
    return set(found.document["start"]["refused_by"])


def would(found: Examined) -> dict[str, str]:
    """What a start would do: subject -> what."""
    return {one["subject"]: one["what"] for one in found.document["start"]["would"]}


def left(conninfo: str, kafka: Broker) -> tuple[object, ...]:
    """Everything that a start might leave."""
    with psycopg.connect(conninfo) as connection:
        row = connection.execute(
            "SELECT (SELECT array_agg(slot_name ORDER BY 1) FROM pg_replication_slots),"
            " (SELECT array_agg(roname ORDER BY 1) FROM pg_replication_origin),"
            " (SELECT array_agg(pubname ORDER BY 1) FROM pg_publication),"
            " (SELECT array_agg(oid ORDER BY 1) FROM pg_class)"
        ).fetchone()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    groups = admin.list_consumer_groups().result(patient(30)).valid
    topics = (name for name in admin.list_topics().topics if name != KAFKAS_OWN)
    return row, sorted(topics), sorted(one.group_id for one in groups)


def test_what_a_role_lacks_is_named_and_the_start_goes_as_it_says(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, topic_prefix: str, kafka: Broker
) -> None:
    admin = pair.primary.conninfo(fresh_database)
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1), (2)")
        connection.execute("ANALYZE t")
        role = f"poor_{topic_prefix}"
        name = sql.Identifier(role)
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(name))
        bridge = new_bridge(
            pair.primary.conninfo(fresh_database, user=role), tables=("public.t",), snapshot={}
        )
        before = left(admin, kafka)
        poor = Examined(bridge)
        assert left(admin, kafka) == before
        assert poor.code == 1
        assert refused_by(poor) >= {"host-refuses", "role-lacks-rights", "publication-refused"}
        assert "FOR TABLE" in poor.one("publication-refused")["remedy"]["text"]
        assert "pg_replication_origin_xact_setup" in poor.one("role-lacks-rights")["evidence"]
        connection.execute(
            sql.SQL("CREATE PUBLICATION {} FOR TABLE t").format(sql.Identifier(bridge.publication))
        )
    made = make_roles(
        pair.primary, fresh_database, publication=bridge.publication, suffix=topic_prefix
    )
    rich = new_bridge(
        pair.primary.conninfo(fresh_database, user=made.bridge), tables=("public.t",), snapshot={}
    )
    before = left(admin, kafka)
    found = Examined(rich)
    assert left(admin, kafka) == before
    assert refused_by(found) == set(), found.document
    told = would(found)
    assert told[f"slot {rich.slot}"].startswith("made, with failover")
    assert "sent beside the changes" in told["rows from before the slot"]
    (topics,) = [subject for subject in told if subject.startswith("topics ")]
    assert f"{topic_prefix}.progress" in topics
    unjudged = {one["subject"] for one in found.document["not_judged"]}
    assert f"Write on transactional ids slotbridge.{topic_prefix}." in unjudged
    rich.start().streaming(admin)
    running = Examined(rich)  # beside the bridge
    assert refused_by(running) == set(), running.document
    assert would(running)[f"slot {rich.slot}"].startswith("streamed from")
    assert "which fits the primary" in would(running)["Kafka"]
    assert rich.stop() == 0, rich.output


def test_positions_that_disagree_are_told_before_a_start(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo)
        bridge.start().streaming()
        connection.execute("INSERT INTO t VALUES (1)")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        connection.execute("SELECT pg_drop_replication_slot(%s)", [bridge.slot])
    found = Examined(bridge).one("start-refused")
    assert "the slot is gone, although Kafka has its progress record" in found["evidence"]
    assert "exit code 30" in found["consequence"]


def test_servers_that_do_not_serve_the_bridge(
    new_pair: NewPair, new_bridge: NewBridge, tmp_path: Path
) -> None:
    """A standby that is away costs a failover, a primary without logical WAL the start."""
    trio = new_pair()
    first, second = trio.primary.conninfo(trio.dbname), trio.standby.conninfo(trio.dbname)
    bridge = new_bridge(f"{first} host=127.0.0.1,127.0.0.1 port={trio.primary.port},{free_port()}")
    add(bridge, failover={"nodes": {"a": first, "b": f"{second} port={free_port()}"}})
    found = Examined(bridge)
    assert refused_by(found) == set()
    assert found.one("host-refuses")["severity"] == "warning"
    assert found.one("node-refuses")["subject"] == "failover.nodes.b"
    assert "failover.nodes.a" in found.document["answers"]
    trio.standby.stop()
    with psycopg.connect(first, autocommit=True) as connection:
        for name, value in (("wal_level", "replica"), ("sync_replication_slots", "off")):
            connection.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE slot_type = 'logical'"
        )
    trio.primary.restart()
    found = Examined(bridge)
    assert found.code == 1
    refused = found.one("host-refuses", f"primary 127.0.0.1:{trio.primary.port}")
    assert refused["evidence"] == "wal_level is replica"
    assert "exit code 21" in refused["consequence"]
    trio.primary.stop()
    found = Examined(bridge)
    assert found.code == 1
    assert "host-refuses" in refused_by(found)


@contextmanager
def answering(status: int) -> Iterator[str]:
    """An HTTP server that gives one answer to everything; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_registry_storage_and_catalog_are_asked(
    pair: Provider,
    fresh_database: str,
    new_bridge: NewBridge,
    schemas: Registry,
    tmp_path: Path,
) -> None:
    primary = pair.primary
    bridge = new_bridge(primary.conninfo(fresh_database))
    files, occupied = tmp_path / "large", tmp_path / "occupied"
    occupied.touch()
    add(
        bridge,
        registry={"url": f"{schemas.url}/nowhere"},
        claim_check={"uri": f"file://{files}"},
        tables={
            "warehouse": str(occupied / "warehouse"),
            "catalog_uri": f"jdbc:postgresql://127.0.0.1:{primary.port}/{fresh_database}_lost",
            "catalog_options": {"jdbc.user": "postgres"},
        },
    )
    found = Examined(bridge)
    refusals = {"registry-refuses", "storage-refuses", "catalog-refuses", "warehouse-refuses"}
    assert {name for name, _ in found.names()} >= refusals
    assert "no schema registry at this path" in found.one("registry-refuses")["evidence"]
    assert "does not exist" in found.one("catalog-refuses")["evidence"]
    files.mkdir()
    with answering(200) as url:
        tables = {"warehouse": str(tmp_path), "catalog_type": "rest", "catalog_uri": url}
        add(
            bridge,
            registry={"url": schemas.url},
            claim_check={"uri": f"file://{files}"},
            tables=tables,
        )
        found = Examined(bridge)
    assert not {name for name, _ in found.names()} & refusals
    assert not [*files.iterdir()]
    unjudged = {one["subject"] for one in found.document["not_judged"]}
    assert f"the object storage file://{files}" in unjudged
    with answering(401) as url:
        add(bridge, tables={**tables, "catalog_uri": url})
        assert "answers 401" in Examined(bridge).one("catalog-refuses")["evidence"]


@pytest.mark.parametrize("options", [{"security.protocol": "ssl"}])
def test_a_kafka_that_does_not_speak_to_us_is_a_refusal(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, options: dict[str, str]
) -> None:
    bridge = new_bridge(pair.primary.conninfo(fresh_database), options=options)
    assert "kafka-refuses" in refused_by(Examined(bridge))
