"""The hosts of a conninfo, also those that libpq reads from elsewhere; hints without a primary."""

from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from schemas.errors import ExitCode, Retryable, SettingsError, SetupError, SlotbridgeError
from schemas.settings import SourceSettings
from services.bridge.source.candidates import AStandby, _no_primary
from services.bridge.source.hosts import host_name, single_hosts

STANDBY = AStandby(
    "the server is read-only (a standby)",
    operation="connect",
    subject="b:5432",
    hint="name the primary in source.conninfo, or promote the standby",
)
STOPPED = Retryable("Connection refused", operation="connect", subject="a:5432", hint="start it")
SHUT_OUT = SetupError(
    "no pg_hba.conf entry",
    operation="connect",
    subject="a:5432",
    hint="allow the connection in pg_hba.conf",
    exit_code=ExitCode.PRIVILEGE_MISSING,
)


def hosts(conninfo: str) -> list[str]:
    source = SourceSettings.model_validate(
        {"conninfo": conninfo, "slot": "s", "publication": "p", "connect_timeout_s": 7}
    )
    return single_hosts(source)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "services.conf"
    path.write_text(
        "[bank]\nhost=standby,primary\nport=5432,5433\ndbname=bank\npassword=it's\n"
        "target_session_attrs=read-write\n"
    )
    monkeypatch.setenv("PGSERVICEFILE", str(path))


@pytest.mark.usefixtures("elsewhere")
def test_each_host_of_a_service_file_has_a_conninfo_of_its_own() -> None:
    found = hosts("service=bank user=u target_session_attrs=read-write")
    assert [host_name(one) for one in found] == ["standby:5432", "primary:5433"]
    for one in found:
        parts = conninfo_to_dict(one)
        assert "target_session_attrs" not in parts and "service" not in parts
        assert (parts["dbname"], parts["user"], parts["password"]) == ("bank", "u", "it's")
    assert [host_name(one) for one in hosts("service=bank host=c port=1")] == ["c:1"]
    with pytest.raises(SettingsError, match="not a connection string"):
        hosts("service=none")


def test_hosts_of_the_environment_are_asked_like_those_of_the_conninfo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGHOST", "a,b")
    monkeypatch.setenv("PGPORT", "6000")
    assert [host_name(one) for one in hosts("dbname=bank")] == ["a:6000", "b:6000"]
    assert [host_name(one) for one in hosts("host=c")] == ["c:6000"]


@pytest.mark.parametrize(
    ("errors", "hint", "promotes"),
    [
        ([SHUT_OUT, STANDBY], "allow the connection in pg_hba.conf", False),
        ([STOPPED, STANDBY], "start it", False),
        ([STANDBY, STANDBY], "name the primary", True),
        ([SHUT_OUT], "allow the connection in pg_hba.conf", False),
    ],
)
def test_a_promotion_is_advised_only_where_every_host_is_a_standby(
    errors: list[SlotbridgeError], hint: str, promotes: bool
) -> None:
    found = _no_primary(errors)
    assert hint in found.hint
    assert ("promote" in found.hint) is promotes
