"""The two settings that name standbys."""

import pytest

from services.failover.model.standby_settings import commits_can_go_on, listed, slots_that_exist
from tests.promises.failover.views import slot


@pytest.mark.parametrize(
    ("setting", "items"),
    [
        ("", ()),
        ("a", ("a",)),
        ("a, b,c", ("a", "b", "c")),
        ('"A b", "q""q"', ("A b", 'q"q')),
        ("*", ("*",)),
    ],
)
def test_lists_are_read_as_postgresql_reads_them(setting: str, items: tuple[str, ...]) -> None:
    assert listed(setting) == items


def test_only_valid_physical_slots_of_the_server_stay() -> None:
    slots = [
        slot("there", slot_type="physical", active_pid=None),
        slot("lost", slot_type="physical", invalidation_reason="wal_removed"),
        slot("logical"),
    ]
    assert slots_that_exist("there, lost, logical, gone", slots) == ("there",)


@pytest.mark.parametrize(
    ("setting", "followers", "met"),
    [
        ("", (), True),
        ("b", (), False),
        ("b", ("b",), True),
        ("FIRST 2 (b, c)", ("b",), False),
        ("first 2 (b, c)", ("b", "c"), True),
        ("ANY 1 (b, c)", ("c",), True),
        ('2 ("B 1", *)', ("b 1", "x"), True),
        ("*", (), False),
        ("*", ("x",), True),
    ],
)
def test_whether_commits_can_go_on(setting: str, followers: tuple[str, ...], met: bool) -> None:
    assert commits_can_go_on(setting, followers) is met
