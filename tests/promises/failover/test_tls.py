"""slotfailover on a pair that takes nothing but TLS, verified in full, and SCRAM."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from services.testbed.bed import Bed
from services.testbed.pair import standby_settings
from services.testbed.postgres import PostgresServer
from tests.promises.failover.servers import slotfailover
from tests.providers.secured import PASSWORD, Certificates, secured_postgres, secured_server
from tests.providers.waiting import eventually, patient

ODD = "d'\"; drop table t; --.é😀"
STANDBY_SLOT = "standby_1"


class Secured:
    """One server, addressed as it wants to be: by TLS that is verified, and a password."""

    def __init__(self, server: PostgresServer, authority: Path) -> None:
        self.server, self.authority = server, authority

    def conninfo(self, dbname: str = "postgres", **extra: Any) -> str:
        given = {
            "host": "localhost",
            "password": PASSWORD,
            "sslmode": "verify-full",
            "sslrootcert": str(self.authority),
        }
        return self.server.conninfo(dbname, **(given | extra))

    def ask(self, query: str) -> Any:
        with psycopg.connect(self.conninfo(), autocommit=True) as connection:
            row = connection.execute(query.encode()).fetchone()
        return None if row is None else row[0]

    def tell(self, *statements: str) -> None:
        with psycopg.connect(self.conninfo(), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())


class _Upstream:
    """How the standby reaches the primary: its files are those of the primary's copy."""

    def __init__(self, primary: Secured, standby: PostgresServer) -> None:
        self._primary, self._standby = primary, standby

    def conninfo(self, dbname: str = "postgres", **extra: Any) -> str:
        files = {
            "password": None,
            "sslcertmode": "disable",
            "passfile": str(self._standby.data / "pgpass"),
            "sslrootcert": str(self._standby.data / "authority.pem"),
        }
        return self._primary.conninfo(dbname, **files, **extra)


@pytest.fixture
def secured_pair(
    local_bed: Bed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Secured, Secured]]:
    """Its standby streams, and synchronizes the slots of the oddly named database ODD."""
    certificates = Certificates(tmp_path_factory.mktemp("tls") / "certificates")
    certificates.make()
    authority = certificates.path("authority.pem")
    primary = Secured(secured_postgres(local_bed, certificates, "secured-a"), authority)
    standby = Secured(secured_server(local_bed, "secured-b"), authority)
    quoted = '"' + ODD.replace('"', '""') + '"'
    primary.tell(
        f"CREATE DATABASE {quoted}",
        f"SELECT pg_create_physical_replication_slot('{STANDBY_SLOT}', true)",
    )
    _clone(local_bed, primary, standby.server)
    standby.server.start()
    streaming = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
    eventually(lambda: primary.ask(streaming) == 1, what="the standby streams", timeout_s=60)
    primary.tell(
        f"ALTER SYSTEM SET synchronized_standby_slots = '{STANDBY_SLOT}'",
        f"ALTER SYSTEM SET synchronous_standby_names = '{STANDBY_SLOT}'",
        "SELECT pg_reload_conf()",
    )
    yield primary, standby
    for each in (standby, primary):
        each.server.stop("immediate")


def _clone(bed: Bed, primary: Secured, standby: PostgresServer) -> None:
    """A copy of the stopped server: its programs have no pg_basebackup."""
    primary.server.stop()
    subprocess.run(["cp", "-a", primary.server.data, standby.data], check=True, timeout=patient(60))
    primary.server.start()
    escaped = PASSWORD.replace("\\", "\\\\").replace(":", "\\:")
    passfile = standby.data / "pgpass"
    passfile.write_text(f"*:*:*:*:{escaped}\n", encoding="utf-8")
    passfile.chmod(0o600)
    bed.run_as.own(passfile)
    upstream = _Upstream(primary, standby)
    with (standby.data / "postgresql.auto.conf").open("a", encoding="utf-8") as file:
        file.write(standby_settings(upstream, slot=STANDBY_SLOT, dbname=ODD))
    (standby.data / "standby.signal").touch()


def test_a_failover_over_tls_with_passwords(
    secured_pair: tuple[Secured, Secured], tmp_path: Path
) -> None:
    """Checked, refused with a wrong password, performed; the password is told nowhere."""
    primary, standby = secured_pair
    used = "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_replication USING (pid)"
    assert primary.ask(used) is True
    good = _configuration(tmp_path, a=primary.conninfo(), b=standby.conninfo())
    wrong = _configuration(
        tmp_path, a=primary.conninfo(password="wrong-8d1"), b=standby.conninfo(password="wrong-8d1")
    )
    checked = slotfailover("check", "--config", good, "--json")
    assert checked.code == 0, checked.out + checked.err
    refused = slotfailover("check", "--config", wrong)
    assert refused.code != 0
    assert "password authentication failed" in refused.out + refused.err
    primary.server.kill()
    shown = slotfailover("failover", "--config", good, "--dry-run")
    assert shown.code == 0, shown.out + shown.err
    ran = slotfailover("failover", "--config", good, "--yes", "--json")
    assert ran.code == 0, ran.out + ran.err
    assert ran.json["new_primary"] == "b"
    assert standby.ask("SELECT pg_is_in_recovery()") is False
    told = "".join(done.out + done.err for done in (checked, refused, shown, ran))
    told += (tmp_path / "journal").read_text(encoding="utf-8")
    for secret in (PASSWORD, "wrong-8d1", "9f3a"):
        assert secret not in told


def _configuration(folder: Path, **nodes: str) -> Path:
    settings = {
        "nodes": nodes,
        "connect_timeout_s": round(patient(3)),
        "journal": str(folder / "journal"),
    }
    path = folder / f"failover-{len(list(folder.iterdir()))}.yaml"
    path.write_text(yaml.safe_dump({"failover": settings}), encoding="utf-8")
    return path
