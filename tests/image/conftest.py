"""Images are built and run with IMAGE=1 only (`make test-image`): they need a container engine."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.image.engine import Contained, build, engine

collect_ignore_glob = [] if os.environ.get("IMAGE") else ["test_*.py"]

NewContainer = Callable[..., Contained]


@pytest.fixture(scope="session")
def client(servers: None) -> Iterator[docker.DockerClient]:
    """The engine's client."""
    with engine() as found:
        yield found


@pytest.fixture(scope="session")
def image(client: docker.DockerClient) -> Callable[[str], str]:
    """`image("bridge")`: the name of that target's image, built at the first call."""
    built: dict[str, str] = {}

    def name(target: str) -> str:
        if target not in built:
            built[target] = build(client, target)
        return built[target]

    return name


@pytest.fixture
def new_container(client: docker.DockerClient) -> Iterator[NewContainer]:
    """Containers that are removed with the test."""
    made: list[Contained] = []

    def make(image: str, **options: Any) -> Contained:
        made.append(Contained(client, image, **options))
        return made[-1]

    yield make
    for container in made:
        container.remove()


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """A folder for the container's user."""
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder
