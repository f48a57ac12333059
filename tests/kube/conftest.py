"""A Kubernetes node, the images in it, and servers outside that its pods can reach.

With KUBE=1 only (`make test-kube`): it needs root, Go, and a container engine for the images. What
tests/kube/node starts ends with the tests, unless KUBE_KEEP=1 leaves it for the next run; the
programs that it builds stay in the user's cache.
"""

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest

from services.testbed.bed import Bed
from tests.image.engine import build, engine
from tests.kube.cluster import NODE, Cluster, NodeBroker, Outside, Release, run, run_told, tell
from tests.kube.ledger import TABLE, Ledger
from tests.kube.stage import Stage
from tests.providers.databases import connect
from tests.providers.embedded import Embedded
from tests.providers.interface import Provider, Trio
from tests.providers.proxy import Proxy

collect_ignore_glob = [] if os.environ.get("KUBE") else ["test_*.py"]
IMAGES = ("bridge", "failover", "tables")
HOST = "10.213.0.1"
"""This machine, as pods see it: tests/kube/node/env.sh."""


@pytest.fixture(scope="session")
def cluster(servers: None) -> Iterator[Cluster]:
    """The node, up."""
    began = time.monotonic()
    tell("\nbuilding and starting the node (minutes, where the cache lacks its programs)")
    kubeconfig = run_told([str(NODE / "up.sh")], timeout_s=7200).splitlines()[-1]
    tell(f"node up after {time.monotonic() - began:.0f} s")
    try:
        yield Cluster(Path(kubeconfig))
    finally:
        if not os.environ.get("KUBE_KEEP"):
            subprocess.run([str(NODE / "down.sh"), "--purge"], check=False)


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> Iterator[Callable[[str], None]]:
    """`images("bridge")`: have the node know that image; it is built at the first call."""
    loaded: set[str] = set()
    with engine() as client:

        def load(target: str) -> None:
            if target not in loaded:
                loaded.add(target)
                _load(client, cluster, target)

        yield load


def _load(client: docker.DockerClient, cluster: Cluster, target: str) -> None:
    """Build an image and hand it to the node, which may have it from a run before (KUBE_KEEP)."""
    began = time.monotonic()
    tell(f"building the image {target}")
    image = client.images.get(build(client, target))
    name = f"localhost/slotbridge-{target}:test"
    image.tag(name)
    built = time.monotonic()
    note = cluster.folder / f"loaded-{target}"
    if not note.exists() or note.read_text(encoding="utf-8") != image.id:
        archive = cluster.folder / f"{target}.tar"
        run(["docker", "save", "-o", str(archive), name])
        run([str(NODE / "image.sh"), "--load", str(archive)])
        archive.unlink()
        note.write_text(str(image.id), encoding="utf-8")
    tell(
        f"image {target}: built in {built - began:.0f} s, in the node "
        f"{time.monotonic() - built:.0f} s later"
    )


@pytest.fixture(scope="module")
def stage(cluster: Cluster, images: Callable[[str], None], provider: Provider) -> Iterator[Stage]:
    """A pair and a broker of the module's own, a namespace, a table, and a ledger of its load."""
    images("bridge")
    images("failover")
    assert isinstance(provider, Embedded)
    prefix = f"k{uuid.uuid4().hex[:8]}"
    with (
        provider.new_trio(synchronous=True, settings={}) as trio,
        _reachable(provider.bed, trio) as outside,
        _namespace(cluster, prefix),
    ):
        with connect(trio.primary, trio.dbname) as connection:
            connection.execute(TABLE)
        release = Release(cluster, prefix)
        release.make_secret("slotbridge", SLOTBRIDGE_SOURCE__CONNINFO=outside.for_pods)
        yield Stage(cluster, outside, trio, release, Ledger(outside, prefix))


@contextlib.contextmanager
def _namespace(cluster: Cluster, name: str) -> Iterator[None]:
    """A namespace in which Pod Security `restricted` is enforced."""
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    try:
        yield
    finally:
        cluster.try_kubectl("delete", "namespace", name, "--wait=false")


@contextlib.contextmanager
def _reachable(bed: Bed, trio: Trio) -> Iterator[Outside]:
    with contextlib.ExitStack() as stack:
        folder = bed.folder / f"kafka-of-pods-{trio.primary.port}"
        broker = NodeBroker(HOST, folder, bed.processes)
        broker.start()
        stack.callback(broker.kill)
        proxies = [Proxy(server.port, host=HOST) for server in (trio.primary, trio.standby)]
        for proxy in proxies:
            stack.callback(proxy.close)
        conninfo = (
            f"host=127.0.0.1,127.0.0.1 port={trio.primary.port},{trio.standby.port} "
            f"dbname={trio.dbname} user=postgres target_session_attrs=read-write connect_timeout=3"
        )
        yield Outside(conninfo, trio.dbname, broker, HOST, proxies)
