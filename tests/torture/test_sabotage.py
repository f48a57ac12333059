"""Each deliberate mistake is one: what it replaces is there, and the faults that show it are."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.testbed.bed import Bed
from tests.torture.brokers import Brokers
from tests.torture.drills import DRILLS, drilled
from tests.torture.faults import faults_with, only
from tests.torture.sabotage import CONTROL, drill_of, names, telling

EACH_IN_A_PROCESS = """
import os, sys
from tests.torture.sabotage import commit, names
for name in names():
    pid = os.fork()
    if not pid:
        try:
            commit(name)
        except BaseException as error:
            print(name, error, flush=True)
            os._exit(1)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_every_mistake_can_be_made() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EACH_IN_A_PROCESS], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""


@pytest.mark.parametrize("name", names())
def test_the_faults_that_show_it_are_drawn(name: str) -> None:
    only(iter(()), telling(name))
    assert not telling(name) or set(telling(name).split(",")) & set(faults_with(1))


def test_every_drill_is_some_mistakes() -> None:
    assert {drill_of(name) for name in names()} == {"", *DRILLS}


@pytest.mark.long
def test_the_right_bridge_passes_the_drill_of_a_forgotten_part(
    local_bed: Bed, tmp_path: Path
) -> None:
    """The others are tests of tests/promises/bridge/evidence and tests/promises/bridge/faults."""
    local_bed.start("kafka")
    drill = drill_of("a keepalive makes the record forget a part")
    assert drilled(local_bed, Brokers(local_bed.kafka), tmp_path, "", drill) == []


def test_there_is_a_control_among_the_mistakes() -> None:
    assert CONTROL in names() and len(names()) > 30
