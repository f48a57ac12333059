"""TLS, SASL and client certificates: the bridge on servers that take nothing else."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclOperation
from confluent_kafka.cimpl import NewTopic
from psycopg import sql

from services.testbed.bed import Bed
from services.testbed.kafka import KafkaBroker
from services.testbed.postgres import PostgresServer
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.test_preflight import Examined
from tests.providers.embedded import Embedded
from tests.providers.interface import Provider
from tests.providers.secured import (
    ACLS,
    PASSWORD,
    SASL_PASSWORD,
    Certificates,
    allow,
    scram_options,
    secured_kafka,
    secured_postgres,
)
from tests.providers.waiting import eventually, patient, patient_ms

WRITE = AclOperation.WRITE


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("tls") / "certificates")
    made.make()
    return made


@pytest.fixture(scope="module")
def local_bed(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    if isinstance(provider, Embedded):
        yield provider.bed
        return
    folder = tmp_path_factory.mktemp("bed")
    with Bed(folder, lazy=True) as bed:
        yield bed


@pytest.fixture(scope="module")
def broker(local_bed: Bed, certificates: Certificates) -> Iterator[KafkaBroker]:
    broker = secured_kafka(local_bed, certificates)
    yield broker
    broker.stop()


@pytest.fixture(scope="module")
def server(local_bed: Bed, certificates: Certificates) -> Iterator[PostgresServer]:
    server = secured_postgres(local_bed, certificates)
    yield server
    server.stop("immediate")


class Secured:
    """A database of its own on the secured server, and the options of both Kafka listeners."""

    def __init__(
        self, server: PostgresServer, broker: KafkaBroker, certificates: Certificates, prefix: str
    ) -> None:
        self.broker, self.certificates, self._server = broker, certificates, server
        self._name = f"d_{prefix}"
        with psycopg.connect(self.conninfo("postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self._name)))
        with psycopg.connect(self.conninfo(), autocommit=True) as connection:
            connection.execute("CREATE TABLE t (id int PRIMARY KEY)")

    def conninfo(self, dbname: str = "", /, **other: Any) -> str:
        given = {
            "host": "localhost",
            "password": PASSWORD,
            "sslmode": "verify-full",
            "sslrootcert": str(self.certificates.path("authority.pem")),
            **other,
        }
        return self._server.conninfo(dbname or self._name, **given)

    @property
    def sasl(self) -> dict[str, str]:
        return scram_options(self.certificates)

    @property
    def mutual(self) -> dict[str, str]:
        return {
            "security.protocol": "SSL",
            "ssl.ca.location": str(self.certificates.path("authority.pem")),
            "ssl.certificate.location": str(self.certificates.path("client.pem")),
            "ssl.key.location": str(self.certificates.path("client.key")),
        }

    def address(self, protocol: str, host: str = "localhost") -> str:
        return f"{host}:{self.broker.secured[protocol]}"


@pytest.fixture
def secured(
    server: PostgresServer, broker: KafkaBroker, certificates: Certificates, topic_prefix: str
) -> Secured:
    return Secured(server, broker, certificates, topic_prefix)


@pytest.mark.parametrize(
    ("protocol", "principal"), [("SASL_SSL", "User:bridge"), ("SSL", "User:CN=bridge")]
)
def test_events_pass_through_tls_as_a_principal_with_the_documented_acls(
    secured: Secured, new_bridge: NewBridge, topic_prefix: str, protocol: str, principal: str
) -> None:
    allow(secured.broker, principal, topic_prefix)
    bridge = new_bridge(
        secured.conninfo(),
        broker=secured.broker,
        bootstrap_servers=secured.address(protocol),
        options=secured.sasl if protocol == "SASL_SSL" else secured.mutual,
    )
    bridge.start().streaming()
    with psycopg.connect(secured.conninfo(), autocommit=True) as connection:
        connection.execute("INSERT INTO t SELECT generate_series(1, 100)")
        used = connection.execute(
            "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_replication USING (pid)"
        ).fetchone()
    assert used == (True,)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(secured.conninfo(), "t")


def test_preflight_names_the_acls_that_a_principal_lacks(
    secured: Secured, new_bridge: NewBridge, topic_prefix: str
) -> None:
    bridge = new_bridge(
        secured.conninfo(),
        broker=secured.broker,
        bootstrap_servers=secured.address("SASL_SSL"),
        options=secured.sasl,
    )

    def refused() -> list[tuple[str, str]]:
        findings = Examined(bridge).findings
        denied = [one for one in findings if one["check"] == "kafka-refuses"]
        assert not [one for one in denied if not one["remedy"]["text"]]
        return sorted((one["subject"], one["evidence"]) for one in denied)

    # The principal is the module's: another test may have let it read in the group already.
    *group, topics = [subject for subject, _ in refused()]
    assert group in ([], ["group slotbridge-start-preflight"])
    assert topics.startswith(f"topics {topic_prefix}.progress")
    allow(secured.broker, "User:bridge", topic_prefix, [one for one in ACLS if one[2] != WRITE])
    admin = AdminClient({"bootstrap.servers": secured.broker.bootstrap_servers})
    made = NewTopic(f"{topic_prefix}.progress", 1, 1, config={"cleanup.policy": "compact"})
    admin.create_topics([made])[made.topic].result(patient(30))
    lacking = [(f"topics {topic_prefix}.progress", "Kafka does not allow Write")]
    eventually(lambda: refused() == lacking, what="preflight sees that Write is missing")
    allow(secured.broker, "User:bridge", topic_prefix)
    eventually(lambda: not refused(), what="preflight sees the documented ACLs")
    found = Examined(bridge)
    assert found.document["start"]["refused_by"] == [], found.document
    bridge.start().streaming()
    assert bridge.stop() == 0, bridge.output


@pytest.mark.long
def test_secrets_come_from_the_environment_and_a_password_file(
    secured: Secured,
    new_bridge: NewBridge,
    topic_prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allow(secured.broker, "User:bridge", topic_prefix)
    escaped = PASSWORD.replace("\\", "\\\\")
    passfile = tmp_path / "pgpass"
    passfile.write_text(f"*:*:*:*:{escaped}\n")
    passfile.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passfile))
    password = {"sasl.password": SASL_PASSWORD}
    monkeypatch.setenv("SLOTBRIDGE_KAFKA__OPTIONS", json.dumps(password))
    known = {key: value for key, value in secured.sasl.items() if key not in password}
    bridge = new_bridge(
        secured.conninfo(password=None),
        broker=secured.broker,
        bootstrap_servers=secured.address("SASL_SSL"),
        options=known,
    )
    bridge.start().streaming()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output


BROKEN_KAFKA = {
    "password": (
        "SASL_SSL",
        "localhost",
        {"sasl.password": "wrong-8d1"},
        20,
        "invalid credentials",
    ),
    "user": ("SASL_SSL", "localhost", {"sasl.username": "nobody"}, 20, "invalid credentials"),
    "authority": ("SASL_SSL", "localhost", {"ssl.ca.location": "stranger.pem"}, 25, "certificate"),
    "name": ("SASL_SSL", "127.0.0.1", {}, 25, "certificate"),
    "no certificate": (
        "SSL",
        "localhost",
        {"ssl.certificate.location": "", "ssl.key.location": ""},
        25,
        "certificate",
    ),
    "another's certificate": (
        "SSL",
        "localhost",
        {"ssl.certificate.location": "intruder.pem", "ssl.key.location": "intruder.key"},
        25,
        "certificate",
    ),
    "no such file": ("SSL", "localhost", {"ssl.ca.location": "none.pem"}, 2, "ssl.ca.location"),
    "no TLS": ("SSL", "localhost", {"security.protocol": "PLAINTEXT"}, 12, "security.protocol"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", BROKEN_KAFKA)
def test_kafka_tls_refusal_is_one_line_with_its_exit_code(
    secured: Secured, new_bridge: NewBridge, case: str
) -> None:
    protocol, host, changes, code, told = BROKEN_KAFKA[case]
    options = secured.sasl if protocol == "SASL_SSL" else secured.mutual
    for key, value in changes.items():
        file = secured.certificates.path(value) if key.endswith(".location") and value else value
        options[key] = str(file)
    options = {key: value for key, value in options.items() if value}
    options["broker.address.family"] = "v4"  # else the answer may be that of ::1
    bridge = new_bridge(
        secured.conninfo(),
        broker=secured.broker,
        bootstrap_servers=secured.address(protocol, host),
        options=options,
        connect_deadline_ms=patient_ms(1_000),
    ).start()
    assert bridge.exit_code() == code, bridge.output
    last = bridge.output.splitlines()[-1]
    assert last.startswith("error: ")
    assert told in last
    assert SASL_PASSWORD not in bridge.output
    assert "wrong-8d1" not in bridge.output
    assert PASSWORD not in bridge.output


BROKEN_POSTGRES: dict[str, tuple[dict[str, str | None], int, str]] = {
    "password": ({"password": "wrong-8d1"}, 20, "password authentication failed"),
    "no password": ({"password": None}, 20, "password"),
    "authority": ({"sslrootcert": "stranger.pem"}, 25, "certificate verify failed"),
    "name": ({"host": "127.0.0.1"}, 25, "does not match host name"),
    "no such file": ({"sslrootcert": "none.pem"}, 2, "none.pem"),
    "no TLS": ({"sslmode": "disable"}, 20, "no encryption"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", BROKEN_POSTGRES)
def test_postgres_tls_refusal_is_one_line_with_its_exit_code(
    secured: Secured, new_bridge: NewBridge, case: str
) -> None:
    changes, code, told = BROKEN_POSTGRES[case]
    if "sslrootcert" in changes:
        changes = {"sslrootcert": str(secured.certificates.path(str(changes["sslrootcert"])))}
    bridge = new_bridge(
        secured.conninfo(**changes),
        broker=secured.broker,
        connect_deadline_ms=patient_ms(1_000),
    ).start()
    assert bridge.exit_code() == code, bridge.output
    last = bridge.output.splitlines()[-1]
    assert last.startswith("error: ")
    assert told in last
    assert PASSWORD not in bridge.output
    assert "wrong-8d1" not in bridge.output


@pytest.mark.long
def test_a_server_without_tls_is_refused(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database, sslmode="require")
    bridge = new_bridge(conninfo, connect_deadline_ms=patient_ms(1_000)).start()
    assert bridge.exit_code() == 25, bridge.output
    assert "server does not support SSL" in bridge.output
