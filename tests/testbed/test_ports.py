"""Ports for servers that are started side by side."""

import socket
import subprocess
import sys
from collections import deque

import pytest

from services.testbed import ports

ASK = "from services.testbed.ports import _mark; print(_mark({}))"


def marked_by_another_process(port: int) -> bool:
    asked = subprocess.run(
        [sys.executable, "-c", ASK.format(port)], capture_output=True, text=True, check=True
    )
    return asked.stdout.strip() == "True"


def test_another_process_does_not_choose_a_port_that_is_not_listened_to_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks: deque[socket.socket] = deque()
    monkeypatch.setattr(ports, "_marks", marks)
    monkeypatch.setattr(ports, "_MARKS_MAX", 1)
    port = ports.free_port()
    assert ports.is_free(port)
    assert not marked_by_another_process(port)
    ports.free_port()
    assert marked_by_another_process(port), "it is long ago"
    marks.pop().close()
