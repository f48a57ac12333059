"""Never two holders of the Lease, whatever happens to requests, clocks and processes."""

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.watch_settings import LeaseSettings
from services.failover.watch.lease.election import Lease, Rules
from tests.promises.failover.watch.lease_simulation import RULES, Clocks, Fate, World

fates = st.builds(
    Fate,
    out_s=st.sampled_from([0.01, 0.01, 0.5, 4.9, 6.0, 12.0, 30.0]),
    back_s=st.sampled_from([0.01, 0.01, 0.5, 4.0, 9.0]),
    lost=st.sampled_from(["", "", "", "request", "answer"]),
    freeze_s=st.sampled_from([0.0, 0.0, 0.0, 3.0, 11.0, 40.0]),
)
clocks = st.builds(
    Clocks,
    offset_s=st.floats(-1e6, 1e6),
    rate=st.floats(0.85, 1.15),
    wall_s=st.lists(st.sampled_from([0.0, 0.0, 1.0, -3600.0, 1e9]), min_size=1, max_size=6).map(
        tuple
    ),
)
happenings = st.tuples(
    st.floats(0.0, 150.0),
    st.sampled_from(
        ["stop a", "stop b", "kill a", "kill b", "delete", "empty", "no holder", "label"]
    ),
)


@given(st.lists(fates, max_size=80), st.tuples(clocks, clocks), st.lists(happenings, max_size=6))
@example([], (Clocks(), Clocks(wall_s=(-3600.0,))), [(30.0, "delete"), (31.0, "empty")])
@example([], (Clocks(), Clocks()), [(30.1, "no holder")])
def test_two_replicas_never_lead_at_the_same_time(
    fates: list[Fate], clocks: tuple[Clocks, Clocks], happenings: list[tuple[float, str]]
) -> None:
    world = World(fates=list(fates))
    for name, of_one in zip("ab", clocks, strict=True):
        world.add(name, of_one)
    for when_s, what in happenings:
        world.at(when_s, partial(happen, world, what))
    world.run(200.0)
    assert all(len(who) <= 1 for _, who in world.leaders), world.leaders
    world.run(400.0)  # by then the network is well, and one leads
    assert len(world.leading) == 1, world.leaders


def happen(world: World, what: str) -> None:
    """A process ends, or an administrator does something to the object."""
    order, _, name = what.partition(" ")
    if order in ("stop", "kill"):
        machine = next(machine for machine in world.machines if machine.name == name)
        machine.stop() if order == "stop" else machine.kill()
    elif order == "delete":
        world.server.lease = None
    elif order == "empty":
        world.server.put(Lease())
    elif world.server.lease is not None:
        holder = "" if what == "no holder" else world.server.lease.holder
        world.server.put(replace(world.server.lease, holder=holder))


def test_the_simulation_finds_two_leaders_where_the_deadline_is_too_long() -> None:
    careless = Rules(duration_s=15.0, deadline_s=30.0, retry_s=2.0)
    world = World(rules=careless)
    world.add("a")
    world.run(18.0)
    assert world.leading == ("a_1",)
    world.add("b")
    world.cut_off.add("a")
    world.run(60.0)
    assert any(len(who) == 2 for _, who in world.leaders)


def test_a_lease_that_is_given_up_moves_at_the_next_attempt() -> None:
    world = World()
    first, _second = world.add("a"), world.add("b")
    world.run(30.0)
    assert world.leading == ("a_1",)
    first.stop()
    world.run(30.0 + RULES.retry_s + 0.1)
    assert world.leading == ("b_1",)


def test_the_lease_of_a_killed_holder_moves_once_its_duration_has_passed() -> None:
    world = World()
    first, _second = world.add("a"), world.add("b")
    world.run(30.0)
    first.kill()
    world.run(30.0 + RULES.duration_s - 2 * RULES.retry_s)
    assert not world.leading
    world.run(30.0 + RULES.duration_s + 2 * RULES.retry_s)
    assert world.leading == ("b_1",)


def test_a_holder_stops_at_its_deadline_where_the_server_is_silent() -> None:
    world = World()
    world.add("a")
    world.run(30.0)
    world.cut_off.add("a")
    world.run(30.0 + RULES.deadline_s + 0.1)
    assert not world.leading


def test_a_write_whose_answer_was_lost_is_found_by_reading() -> None:
    world = World(fates=[*[Fate()] * 9, Fate(lost="answer")])
    world.add("a")
    world.run(17.0)
    assert world.leaders == [(0.0, ())]
    assert world.server.read().holder == "a_1"
    world.run(25.0)
    assert world.leading == ("a_1",)
    assert world.server.read().transitions == 1


def test_another_process_of_the_same_pod_is_another_candidate() -> None:
    world = World()
    machine = world.add("a")
    world.run(30.0)
    machine.kill()
    world.run(40.0)
    assert not world.leading
    world.run(60.0)
    assert world.leading == ("a_3",)


def test_a_document_of_the_server_is_read_and_written_as_it_is() -> None:
    spec = {
        "holderIdentity": "p_1",
        "leaseDurationSeconds": 15,
        "acquireTime": "2026-01-01T00:00:00.000000Z",
        "renewTime": "2026-01-01T00:00:02.000000Z",
        "leaseTransitions": 3,
    }
    assert Lease.of({"spec": spec, "metadata": {"name": "l"}}).spec() == spec
    for bare in ({"metadata": {"name": "l"}}, {"metadata": {"name": "l"}, "spec": None}):
        assert Lease.of(bare).spec() == Lease().spec()
        assert not Lease.of(bare).given_up


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"renew_deadline_ms": 15_000}, "at most nine tenths"),
        ({"retry_ms": 6_000}, "at least twice the retry"),
        ({"name": "Not A Name"}, "name"),
    ],
)
def test_durations_that_allow_two_leaders_are_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        LeaseSettings.model_validate(given)


def test_the_time_that_is_told_is_never_the_same_twice() -> None:
    world = World()
    world.add("a", Clocks(wall_s=(0.0,)))
    world.run(17.0)
    first = world.server.read().renewed
    world.run(20.0)
    assert world.server.read().renewed != first
    assert datetime.fromisoformat(first).tzinfo == UTC
