"""How the tests wait: longer on a slow machine, and never for ever."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.providers.waiting import LEAST, MOST, Machine, factor, measured


@pytest.mark.parametrize(
    ("work_s", "load", "processors", "expected"),
    [
        (0.001, 0.0, 2, LEAST),  # never shorter than on a quiet machine
        (0.02, 1.9, 2, LEAST),
        (0.04, 0.0, 2, 2 * LEAST),  # a slow processor, or little of one
        (0.02, 8.0, 2, 4 * LEAST),  # many wait for a processor
        (0.02, 8.0, 64, LEAST),
        (9.0, 500.0, 1, MOST),
    ],
)
def test_patience_grows_with_what_a_piece_of_work_takes_and_with_the_load(
    work_s: float, load: float, processors: int, expected: float
) -> None:
    assert factor(work_s, load, processors) == pytest.approx(expected)


def test_this_machine_has_a_factor() -> None:
    assert LEAST <= measured() <= MOST


def measures(*factors: float) -> tuple[Machine, Iterator[float]]:
    left = iter(factors)
    return Machine(lambda: next(left)), left


def test_a_machine_is_measured_once_and_grows_more_patient_alone() -> None:
    machine, left = measures(4.0, 3.0, 6.0)
    assert machine.patient(2.0) == 8.0 == machine.patient(2.0)
    machine.look_again()
    assert machine.patient(1.0) == 4.0, "a wait never becomes shorter"
    machine.look_again()
    assert machine.patient(1.0) == 6.0 and not [*left]


def test_a_wait_that_runs_out_measures_again_before_it_fails() -> None:
    machine, left = measures(1.0, 10_000.0)
    asked = iter(range(100))
    found = machine.eventually(
        lambda: next(asked) >= 5, what="the fifth", timeout_s=1e-3, interval_s=2e-3
    )
    assert found and not [*left], "a load that came later counts"


def test_a_wait_ends_where_the_machine_is_no_slower_than_before() -> None:
    machine, left = measures(1.0, 1.0)
    with pytest.raises(AssertionError, match=r"what never comes \(last answer: \[\]\)"):
        machine.eventually(list, what="what never comes", timeout_s=1e-3)
    assert not [*left]


KNOWS_SECONDS = re.compile(
    r"""(?<![\w"'.-])(request_)?timeout=\d\d"""
    r"""|\.(flush|result|wait|join|communicate|init_transactions|abort_transaction)\(\d\d"""
    r"""|assert .*(monotonic|perf_counter)\(\) - \w+ < """
)
FREE = ("torture", "kube", "league")
"""Their time is the experiment, or a promise of seconds: docs/contributing/tests.md."""


def test_no_time_out_of_a_test_is_a_number_of_seconds() -> None:
    """A machine may be as slow as it likes: `patient`, or a condition that is waited for."""
    tests = Path(__file__).parents[1]
    found = [
        f"{path.relative_to(tests)}:{number}: {line.strip()}"
        for path in tests.rglob("*.py")
        if path.relative_to(tests).parts[0] not in FREE and path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if KNOWS_SECONDS.search(line)
    ]
    assert not found, "\n".join(found)
