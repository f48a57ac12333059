"""A pair with a subscription `s1` that is ready; one for all tests that repair what they break.

The shared pair is always looked at by the roles of sql/, the others as AS_ROLES says.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import NewPair
from tests.promises.failover.check.examining import Examiner, examiner_of
from tests.promises.failover.servers import subscribe
from tests.providers.interface import Provider


class SharedPair:
    """Made when first asked for, and anew after a test that left something wrong."""

    def __init__(self, provider: Provider, folders: pytest.TempPathFactory) -> None:
        self._provider = provider
        self._folders = folders
        self._exits = contextlib.ExitStack()
        self._examiner: Examiner | None = None

    def examiner(self) -> Examiner:
        if self._examiner is None:
            trio = self._exits.enter_context(
                self._provider.new_trio(synchronous=False, settings={})
            )
            subscribe(trio, "s1")
            self._examiner = examiner_of(trio, self._folders.mktemp("check"), as_roles=True)
        return self._examiner

    def discard(self) -> None:
        self._examiner = None
        self._exits.close()


@pytest.fixture(scope="session")
def shared(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPair]:
    pair = SharedPair(provider, tmp_path_factory)
    yield pair
    pair.discard()


@pytest.fixture
def sound(shared: SharedPair) -> Iterator[Examiner]:
    """Nothing is wrong before the test, and nothing is wrong after it."""
    examiner = shared.examiner()
    examiner.settle()
    yield examiner
    try:
        examiner.expect()
    except AssertionError:
        shared.discard()
        raise


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
