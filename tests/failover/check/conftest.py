"""A pair with a subscription `s1` that is ready; one for all tests of a module that repair it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import NewPair
from tests.failover.check.examining import Examiner, examiner_of
from tests.failover.servers import subscribe
from tests.providers.interface import Provider


@pytest.fixture(scope="module")
def shared(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examiner]:
    with provider.new_trio(synchronous=False, settings={}) as trio:
        subscribe(trio, "s1")
        yield examiner_of(trio, tmp_path_factory.mktemp("check"))


@pytest.fixture
def sound(shared: Examiner) -> Iterator[Examiner]:
    """Nothing is wrong before the test, and nothing is wrong after it."""
    shared.expect()
    yield shared
    shared.expect()


@pytest.fixture
def bare(new_pair: NewPair, tmp_path: Path) -> Examiner:
    """A pair of the test's own without any logical slot."""
    examiner = examiner_of(new_pair(synchronous=False), tmp_path)
    examiner.expect()
    return examiner


@pytest.fixture
def fresh(new_pair: NewPair, tmp_path: Path) -> Examiner:
    """A pair of the test's own, to destroy."""
    trio = new_pair(synchronous=False)
    subscribe(trio, "s1")
    examiner = examiner_of(trio, tmp_path)
    examiner.expect()
    return examiner
