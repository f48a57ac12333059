"""What a rejoin keeps of a node's configuration where a disk is full."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schemas.settings import MachineSettings
from services.failover.execute.rejoin_node import _Rebuild
from services.failover.execute.rejoin_preflight import Source
from services.failover.model.conninfo import Address, Conninfo
from services.failover.model.host_commands import machine_of
from services.failover.plan.steps.step import Action, Step

CONFIGURATION = "shared_buffers = 1GB\n" * 1000


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """As a disk that is full in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_part_of_a_configuration_is_taken_for_the_whole(tmp_path: Path) -> None:
    data = tmp_path / "main"
    data.mkdir()
    for name in ("postgresql.conf", "pg_hba.conf", "postgresql.auto.conf"):
        (data / name).write_text(CONFIGURATION)
    machine = machine_of("a", MachineSettings(data_folder=data), Address("h", "", "5432"))
    step = Step(
        action=Action.REJOIN,
        server="a",
        subject="slot_a",
        node="b",
        text="rejoin a",
        before="",
        after="",
        effect=lambda view: view,
        holds=lambda _view: True,
    )
    source = Source(Conninfo(()), Conninfo(()), 1, "1/2", 1, None)
    rebuild = _Rebuild(machine, step, source, 60, print)
    with rebuild._locked():
        with files_up_to(1000), pytest.raises(OSError) as full:
            rebuild._keep_configuration()
        assert full.value.errno == errno.EFBIG
        rebuild._keep_configuration()
        rebuild._configure(data, Conninfo((("host", "b"),)))
    for name in ("postgresql.conf", "pg_hba.conf"):
        assert (data / name).read_text() == CONFIGURATION
    assert (data / "postgresql.auto.conf").read_text().startswith(CONFIGURATION)
