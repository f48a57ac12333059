"""A Kubernetes node, the images in it, and servers outside that its pods can reach.

With KUBE=1 only (`make test-kube`): it needs root, Go, and a container engine for the images. What
tests/kube/node starts ends with the tests; the programs that it builds stay in the user's cache.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.testbed.bed import Bed
from tests.image.engine import build, engine
from tests.kube.cluster import NODE, Cluster, NodeBroker, Outside, run, tell
from tests.providers.embedded import Embedded
from tests.providers.interface import Provider, Server, Trio
from tests.providers.proxy import Proxy

collect_ignore_glob = [] if os.environ.get("KUBE") else ["test_*.py"]
IMAGES = ("bridge", "failover")
HOST = "10.213.0.1"
"""This machine, as pods see it: tests/kube/node/env.sh."""


@pytest.fixture(scope="session")
def cluster(servers: None) -> Iterator[Cluster]:
    """The node, up, with the images."""
    began = time.monotonic()
    kubeconfig = run([str(NODE / "up.sh")], timeout_s=3600).splitlines()[-1]
    tell(f"\nnode up after {time.monotonic() - began:.0f} s")
    try:
        began = time.monotonic()
        with engine() as client:
            for target in IMAGES:
                client.images.get(build(client, target)).tag(f"localhost/slotbridge-{target}:test")
                archive = Path(kubeconfig).parent / f"{target}.tar"
                run(["docker", "save", "-o", str(archive), f"localhost/slotbridge-{target}:test"])
                run([str(NODE / "image.sh"), "--load", str(archive)])
                archive.unlink()
        tell(f"images in the node after {time.monotonic() - began:.0f} s")
        yield Cluster(Path(kubeconfig))
    finally:
        subprocess.run([str(NODE / "down.sh"), "--purge"], check=False)


@pytest.fixture
def outside(cluster: Cluster, pair: Provider, fresh_database: str) -> Iterator[Outside]:
    """The session's pair and a broker of its own, both to be reached from pods."""
    assert isinstance(pair, Embedded)
    with _reachable(pair.bed, pair.primary, pair.standby, fresh_database) as found:
        yield found


@pytest.fixture
def own_outside(cluster: Cluster, provider: Provider) -> Iterator[tuple[Outside, Trio]]:
    """A pair of the test's own, to be killed, and a broker."""
    assert isinstance(provider, Embedded)
    with (
        provider.new_trio(synchronous=True, settings={}) as trio,
        _reachable(provider.bed, trio.primary, trio.standby, trio.dbname) as found,
    ):
        yield found, trio


@contextlib.contextmanager
def _reachable(bed: Bed, primary: Server, standby: Server, dbname: str) -> Iterator[Outside]:
    with contextlib.ExitStack() as stack:
        folder = bed.folder / f"kafka-of-{dbname}-{primary.port}"
        broker = NodeBroker(HOST, folder, bed.processes)
        broker.start()
        stack.callback(broker.kill)
        proxies = [Proxy(server.port, host=HOST) for server in (primary, standby)]
        for proxy in proxies:
            stack.callback(proxy.close)
        yield Outside(primary.conninfo(dbname), dbname, broker, HOST, proxies)
