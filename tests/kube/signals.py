"""Signals to what runs in pods, and to the node's own parts: their processes are this machine's."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.kube.cluster import Cluster, Release


def pids_of(release: Release, pod: str) -> list[int]:
    """Numbers of the processes in a pod's containers, found by the pod's control group."""
    uid = release.kubectl("get", "pod", pod, "-o", "jsonpath={.metadata.uid}").strip()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                groups = (folder / "cgroup").read_text(encoding="utf-8")
                command = (folder / "cmdline").read_bytes()
                if uid in groups and b"slot" in command:
                    found.append(int(folder.name))
    assert found, f"pod {pod} has no process of ours"
    return found


@contextlib.contextmanager
def paused(pids: list[int]) -> Iterator[None]:
    """SIGSTOP while the block runs."""
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def kill(pids: list[int]) -> None:
    """SIGKILL."""
    _signal(pids, signal.SIGKILL)


def api_server(cluster: Cluster) -> list[int]:
    """The node's API server, by the pid file that up.sh has written."""
    number, _start = (cluster.folder / "pids/kube-apiserver.pid").read_text("utf-8").split()
    return [int(number)]


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
