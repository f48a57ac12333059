"""A container engine, the images of the Dockerfile, and containers of them.

An engine that answers is used as it is. Otherwise root gets one of its own, without a network
and without rules in the firewall of the machine; it ends with the tests. The base image is
SLOTBRIDGE_IMAGE_BASE, or a Debian that debootstrap makes once a user, because a machine without
access to an image registry must be able to run these tests.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import docker
from docker.errors import ImageNotFound
from docker.models.containers import Container

from schemas.errors import ExitCode, SetupError
from schemas.version import version
from services.testbed.jars import cache_folder
from tests.providers.waiting import eventually, patient

ROOT: Final = Path(__file__).parents[2]
BASE: Final = "slotbridge-test-base:bookworm"
CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
USER: Final = 10001
_PACKAGES: Final = "python3,python3-venv,ca-certificates"


@contextlib.contextmanager
def engine() -> Iterator[docker.DockerClient]:
    """Yield a client of the engine that answers, or of one that is started for the tests."""
    client = _client() if shutil.which("docker") else None
    if client is not None:
        with contextlib.closing(client):
            yield client
        return
    program = shutil.which("dockerd")
    if program is None or os.geteuid() != 0:
        raise SetupError(
            "no container engine answers, and none can be started",
            operation="run the tests of the images",
            hint="start Docker, or as root on Debian: apt-get install docker.io debootstrap",
            exit_code=ExitCode.PROGRAM_MISSING,
        )
    folder = Path(tempfile.mkdtemp(prefix="slotbridge-engine-"))
    socket = f"unix://{folder}/socket"
    data = cache_folder().with_name("engine")  # layers are kept, so that the next build is short
    options = ["--data-root", str(data), "--exec-root", f"{folder}/exec", "-H", socket]
    options += ["--pidfile", f"{folder}/pid", "--iptables=false", "--bridge=none"]
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen([program, *options], stdout=log, stderr=log)
    with pytest_environment(DOCKER_HOST=socket):
        try:
            client = eventually(_client, what="dockerd answers", timeout_s=120, interval_s=0.5)
            yield client
        finally:
            daemon.terminate()
            daemon.wait(timeout=patient(60))
            left = ["umount", f"{folder}/exec/netns/default"]  # which dockerd does not undo
            subprocess.run(left, capture_output=True, check=False)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def pytest_environment(**variables: str) -> Iterator[None]:
    """Set variables of this process's environment for a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _client() -> docker.DockerClient | None:
    """A client, where the command line reaches an engine; the library leaves a socket open else."""
    asked = subprocess.run(["docker", "version"], capture_output=True, check=False)
    return docker.from_env() if asked.returncode == 0 else None


def base_image(client: docker.DockerClient) -> str:
    """Return the name of the base, which is made where the engine does not have it."""
    given = os.environ.get("SLOTBRIDGE_IMAGE_BASE")
    if given:
        return given
    with contextlib.suppress(ImageNotFound):
        client.images.get(BASE)
        return BASE
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise SetupError(
            "there is no base image",
            operation="build the images",
            hint="set SLOTBRIDGE_IMAGE_BASE to an image with python3 3.11+ and apt, such as "
            "python:3.11-slim-bookworm, or be root with debootstrap installed",
            exit_code=ExitCode.PROGRAM_MISSING,
        )
    with tempfile.TemporaryDirectory(prefix="slotbridge-base-") as name:
        folder = Path(name, "root")
        folder.mkdir(mode=0o755)
        options = ["--variant=minbase", f"--include={_PACKAGES}", "bookworm"]
        _run(["debootstrap", *options, str(folder)])
        shutil.copy(CERTIFICATES, folder / CERTIFICATES.relative_to("/"))
        for path in (folder / "var/cache/apt/archives").glob("*.deb"):
            path.unlink()
        archive = Path(name, "root.tar")
        _run(["tar", "-C", str(folder), "-cf", str(archive), "--exclude=./dev/*", "."])
        _run(["docker", "import", str(archive), BASE])
    return BASE


def build(client: docker.DockerClient, target: str) -> str:
    """Build the image of a target and return its name."""
    name = f"slotbridge-{target}:test"
    command = ["docker", "build", "--network", "host", "--target", target, "--tag", name]
    command += ["--build-arg", f"BASE={base_image(client)}"]
    command += ["--build-arg", f"CA_BUNDLE={CERTIFICATES}"]
    command += ["--build-arg", f"VERSION={version()}", str(ROOT)]
    _run(command)
    return name


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[:2]}: {(done.stdout + done.stderr)[-4000:]}"


class Contained:
    """One container as a careful operator would run it: no root, no capability, nothing writable
    but `spool` and /tmp."""

    def __init__(
        self,
        client: docker.DockerClient,
        image: str,
        *,
        config: Path,
        spool: Path | None = None,
        command: list[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        volumes = {str(config): {"bind": "/etc/slotbridge/slotbridge.yaml", "mode": "ro"}}
        if spool is not None:
            os.chown(spool, USER, USER)
            volumes[str(spool)] = {"bind": "/var/lib/slotbridge", "mode": "rw"}
        self._container: Container = client.containers.create(
            image,
            command=command,
            environment=dict(environment or {}),
            network_mode="host",
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            tmpfs={"/tmp": "mode=1777,exec"},  # Java maps libraries that it unpacks there
            volumes=volumes,
        )

    def start(self) -> "Contained":
        self._container.start()
        return self

    def stop(self, timeout_s: int = 30) -> int:
        """`docker stop`; return the exit code (137 where it had to be killed)."""
        self._container.stop(timeout=timeout_s)
        return int(self._container.wait()["StatusCode"])

    def kill(self) -> None:
        """`docker kill`."""
        self._container.kill()
        self._container.wait()

    def finished(self, timeout_s: float = 600) -> int:
        """Wait until it ends by itself; return the exit code."""
        return int(self._container.wait(timeout=timeout_s)["StatusCode"])

    def run(self, *command: str) -> tuple[int, str]:
        """Run a command in it; return exit code and output."""
        code, output = self._container.exec_run(list(command))
        return code, bytes(output).decode(errors="replace")

    @property
    def running(self) -> bool:
        self._container.reload()
        return bool(self._container.status == "running")

    @property
    def output(self) -> str:
        return bytes(self._container.logs()).decode(errors="replace")

    @property
    def attributes(self) -> dict[str, Any]:
        return dict(self._container.attrs)

    def remove(self) -> None:
        self._container.remove(force=True)
