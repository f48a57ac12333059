"""The container engine, for CONTAINERS=1: is it there, are the images, and one container of ours.

All containers share the host's network: a conninfo or bootstrap address then means the same to the
test, to a subscriber and to a standby.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from signal import Signals
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound
from docker.models.containers import Container as Running
from testcontainers.core.container import DockerContainer

from schemas.errors import ExitCode, SetupError
from tests.providers.waiting import eventually

POSTGRES_IMAGE = os.environ.get("SLOTBRIDGE_POSTGRES_IMAGE", "postgres:18")
KAFKA_IMAGE = os.environ.get("SLOTBRIDGE_KAFKA_IMAGE", "apache/kafka:4.3.0")
_NETWORK = "host"
_STOP_TIMEOUT_S = 60.0


def require_engine() -> None:
    """Raise SetupError, one clear line, unless an engine answers and has or gets both images."""
    try:
        with contextlib.closing(docker.from_env()) as client:
            client.ping()
            for image in (POSTGRES_IMAGE, KAFKA_IMAGE):
                try:
                    client.images.get(image)
                except ImageNotFound:
                    client.images.pull(image)
    except DockerException as error:
        raise SetupError(
            f"no container engine with the images: {_first_line(error)}",
            operation="run tests with CONTAINERS=1",
            hint=f"start Docker, let it pull {POSTGRES_IMAGE} and {KAFKA_IMAGE}, or unset "
            "CONTAINERS to use embedded servers",
            exit_code=ExitCode.PROGRAM_MISSING,
        ) from error


class Container:
    """One container that is stopped, killed and started again with its data; removed by `close`."""

    def __init__(
        self,
        image: str,
        *,
        environment: Mapping[str, str],
        command: Sequence[str] = (),
        entrypoint: Sequence[str] = (),
        user: str = "",
    ) -> None:
        self.image = image
        self._definition = (
            DockerContainer(image)
            .with_envs(**environment)
            .with_command(list(command))
            .with_kwargs(
                network_mode=_NETWORK,
                stop_signal="SIGTERM",
                **({"entrypoint": list(entrypoint)} if entrypoint else {}),
                **({"user": user} if user else {}),
            )
        )
        self._made = False

    @property
    def running(self) -> bool:
        """True while its main process runs."""
        if not self._made:
            return False
        self._container.reload()
        return bool(self._container.status == "running")

    def start(self) -> None:
        """Create and start it the first time, later start it again on its data."""
        if self._made:
            self._container.start()
        else:
            self._definition.start()
            self._made = True

    def send(self, number: Signals) -> None:
        """Send a signal to its main process; nothing if that has ended."""
        with contextlib.suppress(APIError):
            self._container.kill(signal=number.name)

    def end(self, number: Signals, *, timeout_s: float = _STOP_TIMEOUT_S) -> bool:
        """Send a signal and wait for the end of all its processes; return whether they ended."""
        if not self.running:
            return True
        self.send(number)
        try:
            eventually(lambda: not self.running, what="the container ends", timeout_s=timeout_s)
        except AssertionError:
            return False
        return True

    def pause(self) -> None:
        """Freeze all its processes."""
        self._container.pause()

    def resume(self) -> None:
        """Undo `pause`."""
        self._container.unpause()

    def run(
        self, command: Sequence[str], *, environment: Mapping[str, str], user: str
    ) -> tuple[int, str, str]:
        """Run a program in it, or with its data if it is stopped: status, stdout, stderr."""
        if not self.running:
            return self._run_beside(command, environment, user)
        done = self._container.exec_run(
            list(command), environment=dict(environment), user=user, demux=True
        )
        out, err = ((part or b"").decode() for part in done.output)
        return done.exit_code, out, err

    def tail(self, lines: int = 15) -> str:
        """The end of its output."""
        return bytes(self._container.logs(tail=lines)).decode(errors="replace")

    def close(self) -> None:
        """Kill and remove it with its data."""
        if self._made:
            self._definition.stop(force=True, delete_volume=True)

    @property
    def _container(self) -> Running:
        return self._definition.get_wrapped_container()

    def _run_beside(
        self, command: Sequence[str], environment: Mapping[str, str], user: str
    ) -> tuple[int, str, str]:
        client: Any = self._definition.get_docker_client().client
        helper = client.containers.run(
            self.image,
            entrypoint=list(command),
            environment=dict(environment),
            user=user,
            network_mode=_NETWORK,
            volumes_from=[self._container.id],
            detach=True,
        )
        try:
            status = int(helper.wait()["StatusCode"])
            out, err = (helper.logs(stdout=first, stderr=not first) for first in (True, False))
            return status, out.decode(), err.decode()
        finally:
            helper.remove(force=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
