"""A factory of bridges that ends them with the test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bridge.conftest import COMPILED, twin
from tests.promises.bridge.running import Bridge
from tests.providers.interface import Broker

__all__ = ["COMPILED", "twin"]
NewBridge = Callable[..., Bridge]


@pytest.fixture
def new_bridge(tmp_path: Path, kafka: Broker, topic_prefix: str) -> Iterator[NewBridge]:
    """`new_bridge(conninfo, **settings)`: a bridge that is not started yet."""
    made: list[Bridge] = []

    def make(conninfo: str, *, prefix: str = "", broker: Broker = kafka, **settings: Any) -> Bridge:
        made.append(Bridge(tmp_path, conninfo, broker, prefix or topic_prefix, **settings))
        return made[-1]

    yield make
    for bridge in made:
        bridge.end()
