"""Servers for tests: real PostgreSQL and Kafka, started when the first test asks for them.

servers                      nothing itself: who starts a server or Java requests it, see below
provider                     all parts, none started; CONTAINERS=1 takes them from containers
                             SLOTBRIDGE_POSTGRES=17.10 another PostgreSQL (OTHER_POSTGRES), or the
                             `bin` folder of one
bed, pair, subscriber, kafka the session's servers, started: do not stop, kill or promote them
new_pair()                   a fresh pair and subscriber for one test that does such things
fresh_database               name of an empty database on the session's primary
fresh_subscriber_database    the same on the session's subscriber
oldest_pair                  a primary and its standby of the oldest PostgreSQL that is supported
topic_prefix                 a prefix of topics that no other test uses

A test that requests `servers`, directly or through another fixture, gets the marker `servers`. All
others run without any server: `make quick` runs these alone. tests/serverless.py fails one that
starts a server nevertheless.
"""

import contextlib
import gc
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from schemas.errors import SetupError
from services.testbed.other_postgres import major_of
from tests import shards
from tests.progress import Progress
from tests.providers import databases
from tests.providers.interface import Broker, Provider, Server, Trio
from tests.providers.memory import delete_left_behind, roomy_memory
from tests.providers.registry import Registry, registry
from tests.scheduling import weight
from tests.serverless import NEEDS_SERVERS, no_servers

NewPair = Callable[..., Trio]
OLDEST_POSTGRES = "17.5"
"""What services.bridge.source.server_requirements.check_server takes as the oldest."""
POSTGRES = os.environ.get("SLOTBRIDGE_POSTGRES", "")
"""The version of all other servers; empty: the package's."""

# A loaded machine must not fail a property for being slow; pytest-timeout ends what hangs.
# `make test` tries the same few examples for the same code (any constant in it may be one of them),
# `make test-long` others at each run, and `make properties` many more.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("long", deadline=None)
settings.register_profile("new examples", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --shard."""
    parser.addoption("--shard", default="", help="run one shard of all tests, such as 2/6")


def pytest_configure(config: pytest.Config) -> None:
    """Tell how a long run goes. With CONTAINERS=1 and no engine: one clear error, not many."""
    if config.getoption("shard"):
        try:
            shard = shards.parse(config.getoption("shard"))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        config.pluginmanager.register(shards.Sharding(config, shard))
        settings.load_profile("long")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))
        delete_left_behind()
    if _from_containers():
        from tests.providers.engine import require_engine

        try:
            require_engine()
        except SetupError as error:
            raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: to search it for garbage costs a second here, and later again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Several workers share the tests by file."""
    from tests.scheduling import ByFile

    return ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no worker is left with it at the end.

    What needs PostgreSQL 19, which no package brings yet, is left to `make postgres-19`.
    """
    if not POSTGRES or major_of(POSTGRES) < 19:
        left = [item for item in items if item.get_closest_marker("since_19")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("since_19")]
    items.sort(key=lambda item: weight(item.nodeid))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that need servers."""
    if NEEDS_SERVERS in getattr(item, "fixturenames", ()):
        item.add_marker(NEEDS_SERVERS)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs PostgreSQL 18 where the servers are older."""
    wants_18 = item.get_closest_marker("since_18") is not None
    if wants_18 and POSTGRES and major_of(POSTGRES) < 18:  # of a folder, its server is asked
        pytest.skip(f"this needs PostgreSQL 18, and the servers are {POSTGRES}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that starts a server without the marker."""
    allowed = item.get_closest_marker(NEEDS_SERVERS) is not None
    with contextlib.nullcontext() if allowed else no_servers(item.nodeid):
        return (yield)


@pytest.fixture(scope="session")
def servers() -> None:
    """Request this where a server, or Java, is started: it marks the test."""


@pytest.fixture(scope="module")
def schemas(servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A schema registry for the tests of a file that do not stop it."""
    with registry(tmp_path_factory.mktemp("registry")) as made:
        yield made


@pytest.fixture(scope="session")
def provider(request: pytest.FixtureRequest, servers: None) -> Iterator[Provider]:
    """Where servers come from; nothing runs yet."""
    if _from_containers():
        from tests.providers.containers import containers

        with containers() as made:
            yield made
        return
    from tests.providers.embedded import embedded

    with _test_folder(request) as folder, embedded(folder, postgres=POSTGRES) as made:
        yield made


@pytest.fixture(scope="session")
def oldest_pair(request: pytest.FixtureRequest, servers: None) -> Iterator[Provider]:
    """A primary and its standby of OLDEST_POSTGRES, up; the standby's commits are waited for."""
    from tests.providers.embedded import embedded

    with _test_folder(request) as folder, embedded(folder, postgres=OLDEST_POSTGRES) as made:
        made.start("pair")
        yield made


@pytest.fixture(scope="session")
def bed(provider: Provider) -> Provider:
    """Pair, subscriber and Kafka, all up."""
    provider.start("pair", "subscriber", "kafka")
    return provider


@pytest.fixture(scope="session")
def pair(provider: Provider) -> Provider:
    """The primary and its standby, up; commits wait for the standby."""
    provider.start("pair")
    return provider


@pytest.fixture(scope="session")
def subscriber(provider: Provider) -> Server:
    """A server for subscriptions, up."""
    provider.start("subscriber")
    return provider.subscriber


@pytest.fixture(scope="session")
def kafka(provider: Provider) -> Broker:
    """A broker, up."""
    provider.start("kafka")
    return provider.kafka


@pytest.fixture
def fresh_database(pair: Provider) -> Iterator[str]:
    """An empty database on the primary; dropped with its slots, origins and subscriptions."""
    with database(pair.primary, pair.standby) as name:
        yield name


@pytest.fixture
def fresh_subscriber_database(subscriber: Server) -> Iterator[str]:
    """An empty database on the subscriber; dropped with its subscriptions."""
    with database(subscriber) as name:
        yield name


@pytest.fixture
def topic_prefix() -> str:
    """A prefix that no other test uses."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def new_pair(provider: Provider) -> Iterator[NewPair]:
    """`new_pair(synchronous=True, settings={})`: a fresh Trio to destroy, about 2 s each."""
    with contextlib.ExitStack() as stack:

        def make(
            *, synchronous: bool = True, settings: Mapping[str, str | int] | None = None
        ) -> Trio:
            return stack.enter_context(
                provider.new_trio(synchronous=synchronous, settings=settings or {})
            )

        yield make


def _from_containers() -> bool:
    return os.environ.get("CONTAINERS", "") not in ("", "0")


@contextlib.contextmanager
def _test_folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder for servers; of a failed session, their logs are kept."""
    folder = Path(tempfile.mkdtemp(prefix="slotbridge-test-", dir=roomy_memory()))
    folder.chmod(0o755)  # PostgreSQL may run as another user
    yield folder
    if request.session.testsfailed:
        _keep_logs(folder, request.config)
    else:
        shutil.rmtree(folder)


def _keep_logs(folder: Path, config: pytest.Config) -> None:
    """Keep the servers' logs of a failed session, without their data, and say where they are."""
    logs = Path(tempfile.mkdtemp(prefix="slotbridge-logs-")) / "logs"
    shutil.move(folder / "logs", logs)
    shutil.rmtree(folder)
    if hasattr(config, "workeroutput"):
        config.workeroutput["logs"] = str(logs)
    else:
        _tell_where(config, logs)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of several is done: tell where its servers' logs are, where it kept them."""
    logs = getattr(node, "workeroutput", {}).get("logs")
    if logs:
        _tell_where(node.config, logs)


def _tell_where(config: pytest.Config, logs: Path | str) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"the servers' logs are in {logs}")


@contextlib.contextmanager
def database(server: Server, standby: Server | None = None) -> Iterator[str]:
    """An empty database; dropped with all that hangs on it."""
    name = f"t{uuid.uuid4().hex[:12]}"
    known = databases.origins(server)
    databases.drop_removed(server, standby)
    databases.create(server, name)
    if standby is not None:
        databases.await_copy(standby, name)
    try:
        yield name
    finally:
        databases.remove(server, name, keep_origins=known)
