"""A database for a whole module."""

import uuid
from collections.abc import Iterator

import pytest

from tests.providers import databases
from tests.providers.interface import Provider


@pytest.fixture(scope="module")
def database(pair: Provider) -> Iterator[str]:
    """An empty database on the session's primary; its slots and origins go with the module."""
    name = f"t{uuid.uuid4().hex[:12]}"
    known = databases.origins(pair.primary)
    databases.create(pair.primary, name)
    databases.await_copy(pair.standby, name)
    try:
        yield name
    finally:
        databases.remove(pair.primary, name, keep_origins=known)
