"""A factory of bridges that ends them with the test."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.bridge import compiled
from tests.bridge.running import Bridge
from tests.providers.interface import Broker

CAN_COMPILE = compiled.engine is not None or shutil.which("cc") is not None
"""Without a compiler there is one way only, and it is tested."""


@pytest.fixture(scope="module", params=["compiled", "plain"] if CAN_COMPILE else ["plain"])
def twin(request: pytest.FixtureRequest) -> Iterator[str]:
    """Once with the compiled way of rows, once without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain":
            patch.setattr(compiled, "engine", None)
        else:
            assert compiled.engine is not None, "not built: see setup.py"
        yield request.param


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
