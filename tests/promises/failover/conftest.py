"""A pair on this machine whose servers the command itself may stop, start and rewind."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from services.failover.execute import rejoin_preflight, run
from services.testbed.bed import Bed
from services.testbed.postgres import PostgresServer
from tests.providers.embedded import Embedded
from tests.providers.interface import Provider, Server, Trio
from tests.providers.waiting import patient

NewTrio = Callable[..., Trio]


@pytest.fixture(autouse=True, scope="session")
def patient_commands() -> Iterator[None]:
    """Commands of this process give a slow machine longer than a quiet one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "DISABLE_S", patient(1.7))
        patch.setattr(rejoin_preflight, "_TIMEOUT_S", patient(3.4))
        yield


@pytest.fixture(scope="session")
def local_bed(provider: Provider) -> Iterator[Bed]:
    """A bed of embedded servers, whoever provides the other tests'."""
    if isinstance(provider, Embedded):
        yield provider.bed
        return
    with tempfile.TemporaryDirectory(prefix="slotbridge-test-") as folder:
        Path(folder).chmod(0o755)
        with Bed(Path(folder), lazy=True) as bed:
            yield bed


@pytest.fixture
def local_trio(local_bed: Bed) -> Iterator[NewTrio]:
    """`local_trio(settings={})`: as `new_pair`, with data folders on this machine."""
    with contextlib.ExitStack() as stack:

        def make(settings: Mapping[str, str | int] | None = None) -> Trio:
            pair, subscriber = stack.enter_context(local_bed.new_pair(settings=settings))
            for server in (pair.primary, pair.standby):
                stack.callback(end, server)
            return Trio(pair.primary, pair.standby, subscriber, pair.dbname)

        yield make


def machines(trio: Trio, bed: Bed, **more: Server) -> dict[str, Any]:
    """`failover.machines` for nodes a and b of a local trio, and `more`."""
    return {
        name: {
            "data_folder": str(server.data),
            "bin_folder": str(server.programs),
            "server_options": ["-c", f"port={server.port}", "-c", f"cluster_name={server.name}"],
            "os_user": bed.run_as.name if bed.run_as.switch else "",
        }
        for name, server in {"a": trio.primary, "b": trio.standby, **more}.items()
        if isinstance(server, PostgresServer)
    }


def end(server: PostgresServer) -> None:
    """Stop it, also where it was not the bed that started it last."""
    server.run_tool("pg_ctl", ["stop", "-D", server.data, "-m", "immediate"], check=False)
