"""Whether rows may be read from a standby, by what it tells. Pure."""

from dataclasses import replace

import psycopg
import pytest

from schemas.errors import ExitCode, OperatorNeeded, SetupError, SlotbridgeError
from services.bridge.snapshot.row_order import named_collations, order_difference
from services.bridge.snapshot.row_reader import NotNow
from services.bridge.snapshot.standby import Standby
from services.bridge.snapshot.standby_state import (
    StandbyState,
    require_all_rows,
    require_same_process,
    require_timeline,
    require_written,
)
from services.bridge.source.server_errors import connect_error
from services.postgres.server import Server

STATE = StandbyState(
    in_recovery=True,
    replayed=100,
    kept_by="",
    receiver=7,
    timeline=1,
    row_security=False,
    process="8 since noon",
)
PRIMARY = Server(
    system_identifier="1",
    timeline=1,
    version=180000,
    database="d",
    in_recovery=False,
    wal_level="logical",
    synchronized_standby_slots="",
    wal_sender_timeout_ms=60_000,
)


def test_a_standby_beyond_what_the_primary_has_written_is_another_servers() -> None:
    require_written(100, 100, "s")
    with pytest.raises(OperatorNeeded, match="replays the WAL of another server") as seen:
        require_written(101, 100, "s")
    assert seen.value.exit_code is ExitCode.WRONG_DATABASE


def test_the_process_that_reads_is_the_one_that_was_judged() -> None:
    require_same_process(STATE, STATE._replace(replayed=200), "s")
    with pytest.raises(NotNow, match="several processes"):
        require_same_process(STATE, STATE._replace(process="8 since one"), "s")
    with pytest.raises(NotNow, match="several processes"):
        require_same_process(None, STATE, "s")


def test_a_pooler_that_drops_options_is_refused() -> None:
    require_all_rows(STATE, "s")
    with pytest.raises(SetupError, match="row_security is on"):
        require_all_rows(STATE._replace(row_security=True), "s")


def test_a_standby_of_unknown_or_other_timeline_is_not_read() -> None:
    require_timeline(STATE, "s", PRIMARY)
    with pytest.raises(NotNow, match="not judged"):
        require_timeline(STATE._replace(receiver=None, timeline=None), "s", PRIMARY)
    with pytest.raises(SetupError, match="can't see"):
        require_timeline(STATE._replace(timeline=None), "s", PRIMARY)
    with pytest.raises(NotNow, match="the primary writes 2"):
        require_timeline(STATE, "s", replace(PRIMARY, timeline=2))


def test_collations_of_other_versions_are_told_from_equal_and_unknown_ones() -> None:
    here = {"a": "2.36", "b": "153.120", "c": None, "d": "1", "e": None}
    there = {"a": "2.36", "b": "153.121", "c": None, "d": None, "f": "3"}
    found = order_difference(here, there)
    assert found.not_judged == "c, e"
    assert found.different == (
        "b (primary 153.120, standby 153.121), d (primary 1, standby unknown), "
        "f (primary unknown, standby 3)"
    )
    assert order_difference({}, {}) == ("", "")


@pytest.mark.parametrize(
    ("condition", "named"),
    [
        ("a > 'x' COLLATE \"de_DE\" AND b < 'y' collate pg_catalog.c", ['"de_DE"', "pg_catalog.c"]),
        ('a = b COLLATE"odd ""name" . "b"', ['"odd ""name" . "b"']),
        ("a = b COLLATE /* none */ d", ['"COLLATE"']),
        ("collated = 'a' AND no_collate > 1", []),
    ],
)
def test_collations_that_a_condition_names_are_found(condition: str, named: list[str]) -> None:
    assert named_collations(condition) == named


@pytest.mark.parametrize(
    ("error", "slow", "never"),
    [
        (psycopg.errors.FeatureNotSupported("unlogged relations"), False, True),
        (psycopg.errors.UndefinedFile("could not open file"), True, False),
        (psycopg.errors.DataCorrupted("invalid page"), True, False),
        (psycopg.errors.DiskFull("no space left"), True, False),
        (psycopg.errors.InsufficientPrivilege("permission denied"), False, False),
    ],
)
def test_errors_of_a_standby_do_not_end_the_bridge(
    error: psycopg.Error, slow: bool, never: bool
) -> None:
    standby = Standby("host=h", "p", "s", PRIMARY, deadline_ms=1)
    with pytest.raises((NotNow, SlotbridgeError)) as seen, standby._statement("read rows"):
        raise error
    found = seen.value
    assert isinstance(found, NotNow) == (slow or never), found
    assert (getattr(found, "slow", False), getattr(found, "never", False)) == (slow, never)


def test_a_refused_connection_names_the_setting_of_its_server() -> None:
    for error in (psycopg.errors.InvalidPassword("no"), psycopg.OperationalError("nobody")):
        assert "source.conninfo" in connect_error(error, "h").hint
        assert "snapshot.conninfo" in connect_error(error, "h", "snapshot.conninfo").hint
