"""The Lease asked for over HTTP, and the lock that only its holder takes.

What answers here is a stand-in with one object. The API server itself is asked in tests/kube.
"""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from schemas.errors import SettingsError
from schemas.settings import load_settings
from schemas.watch_settings import LeaseSettings
from services.failover.observe.cluster import Cluster
from services.failover.plan.request import Request
from services.failover.watch.lease.election import Lease, Rules
from services.failover.watch.lease.elector import Elector, LeaseReport, NoLease, election_of
from services.failover.watch.lease.lease_api import Conflict, LeaseApi, Unanswered, lease_api
from services.failover.watch.loop import Watch
from services.failover.watch.pause import Pause
from services.failover.watch.shared_state import SharedStateStore
from services.failover.watch.snapshot import Snapshot
from services.failover.watch.web.metrics import registry_of
from services.failover.watch.web.page import page
from services.failover.watch.web.status import status_of
from services.runtime.process import Stop
from tests.promises.failover.conftest import NewTrio
from tests.promises.failover.servers import ask, await_equal, configuration, subscribe, write
from tests.promises.failover.watch.test_live import LEADS_TO, promote, unquoted
from tests.promises.failover.watch.watch_process import SETTINGS
from tests.providers.interface import Trio
from tests.providers.waiting import eventually, patient

PATH = "/apis/coordination.k8s.io/v1/namespaces/cdc/leases"
RULES = Rules(duration_s=patient(20), deadline_s=patient(15), retry_s=0.1)
SOON = Rules(duration_s=patient(0.6), deadline_s=patient(0.4), retry_s=0.1)
"""Where the deadline is to pass; nothing is sure then but that it does."""
WAITING = """
    SELECT count(*) FROM pg_locks WHERE relation = 'pg_subscription'::regclass AND NOT granted
"""


class ApiServer(ThreadingHTTPServer):
    """One Lease; `answers_with` overrules what a request would get."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.document: dict[str, Any] | None = None
        self.answers_with: int | None = None
        self.hangs = False
        self.healed = threading.Event()
        self.asked: list[tuple[str, str, str]] = []

    def give_up_for(self, name: str) -> None:
        """Let the Lease be one that its holder gave up: nobody waits for its duration."""
        spec = Lease(duration_s=1, renewed="2026-01-01T00:00:00.000000Z").spec()
        self.document = {"metadata": {"name": name, "resourceVersion": "1"}, "spec": spec}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """GET, POST and PUT of the object."""

    server: ApiServer

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    do_PUT = do_POST

    def _answer(self, body: dict[str, Any] | None) -> None:
        server = self.server
        server.asked.append((self.command, self.path, self.headers.get("Authorization", "")))
        if server.hangs:
            server.healed.wait(patient(60))
        code = server.answers_with or self._carry_out(body)
        document = server.document if code < 300 else {"message": f"told with {code}"}
        text = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _carry_out(self, body: dict[str, Any] | None) -> int:
        present = self.server.document
        if body is None:
            return 200 if present is not None else 404
        if self.command == "POST":
            if present is not None:
                return 409
            version = 1
        else:
            if present is None:
                return 404
            if body["metadata"].get("resourceVersion") != present["metadata"]["resourceVersion"]:
                return 409
            version = int(present["metadata"]["resourceVersion"]) + 1
        self.server.document = {
            **body,
            "metadata": {**body["metadata"], "resourceVersion": str(version)},
        }
        return 201 if self.command == "POST" else 200

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.healed.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("first\n")
    (folder / "namespace").write_text("cdc")
    return folder


@pytest.fixture
def api(server: ApiServer, account: Path) -> LeaseApi:
    return LeaseApi(server.url, "cdc", "r-failover", account=account, timeout_s=patient(10))


def test_the_lease_is_created_read_and_replaced_by_version(
    server: ApiServer, api: LeaseApi, account: Path
) -> None:
    assert not api.read().exists
    made = api.write(Lease("p_1", 15, "then", "then", 1))
    assert made == api.read()
    assert made.holder == "p_1"
    (account / "token").write_text("second")
    api.write(made)
    with pytest.raises(Conflict):
        api.write(made)
    with pytest.raises(Conflict):
        api.write(Lease("p_2"))
    assert server.asked[0] == ("GET", f"{PATH}/r-failover", "Bearer first")
    assert server.asked[1][:2] == ("POST", PATH)
    assert server.asked[3] == ("PUT", f"{PATH}/r-failover", "Bearer second")


def test_a_refusal_names_what_the_service_account_lacks(server: ApiServer, api: LeaseApi) -> None:
    server.answers_with = 403
    with pytest.raises(Unanswered, match=r"refuses \(403\): told with 403 .*needs `get`"):
        api.read()
    server.answers_with = 500
    with pytest.raises(Unanswered, match=r"refuses \(500\): told with 500"):
        api.read()


def test_a_server_that_hangs_is_not_waited_for(server: ApiServer, account: Path) -> None:
    server.hangs = True
    hasty = LeaseApi(server.url, "cdc", "r-failover", account=account, timeout_s=0.4)
    with pytest.raises(Unanswered, match="does not answer"):
        hasty.read()
    assert not server.healed.is_set()


def test_outside_of_kubernetes_the_setting_is_refused(account: Path, tmp_path: Path) -> None:
    settings = LeaseSettings(name="r-failover")
    with pytest.raises(SettingsError, match=r"failover\.watch\.lease\.name is set"):
        election_of(settings, {})
    host = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(SettingsError, match="none/namespace is missing"):
        lease_api("l", host, 1.0, tmp_path / "none")
    assert lease_api("l", host, 1.0, account).namespace == "cdc"
    assert isinstance(election_of(LeaseSettings(), {}), NoLease)


def test_a_released_lease_moves_at_once_and_the_loser_knows(
    server: ApiServer, api: LeaseApi
) -> None:
    server.give_up_for(api.name)
    first, second = Elector(api, RULES, "p1_x"), Elector(api, RULES, "p2_y")
    with second.keep():
        with first.keep():
            eventually(lambda: first.holds() or second.holds(), what="one holds it")
            assert first.holds() != second.holds()
            leader, other = (first, second) if first.holds() else (second, first)
            eventually(lambda: other.report().holder, what="the other knows who")
            assert leader.report().held
            assert other.report().elsewhere == f"the Lease r-failover is held by {pod_of(leader)}"
        eventually(second.holds, what="the other holds it")
    last = api.read()
    assert last.given_up
    assert last.transitions == (2 if leader is first else 1)


def pod_of(elector: Elector) -> str:
    return elector.report().holder


@pytest.mark.slow
def test_a_holder_stops_leading_while_the_server_is_silent(
    server: ApiServer, api: LeaseApi
) -> None:
    elector = Elector(api, SOON, "p1_x")
    with elector.keep():
        eventually(elector.holds, what="it holds the Lease")
        server.answers_with = 503
        eventually(lambda: not elector.holds(), what="the deadline passes")
        eventually(lambda: "refuses (503)" in elector.report().elsewhere, what="it says why")
        server.answers_with = None
        eventually(elector.holds, what="it holds the Lease again")
        eventually(lambda: elector.report().problem == "", what="nothing is wrong any more")


def test_a_lease_that_makes_no_sense_is_told_and_asked_for_again(
    server: ApiServer, api: LeaseApi
) -> None:
    times = {"leaseDurationSeconds": "fifteen", "renewTime": "2026-01-01T00:00:00.000000Z"}
    server.document = {
        "metadata": {"name": api.name, "resourceVersion": "1"},
        "spec": {"holderIdentity": "p2_y", **times},
    }
    elector = Elector(api, RULES, "p1_x")
    with elector.keep():
        eventually(lambda: "TypeError" in elector.report().problem, what="the error is told")
        assert not elector.holds()
        server.give_up_for(api.name)
        eventually(elector.holds, what="it holds the Lease")
        eventually(lambda: elector.report().problem == "", what="nothing is wrong any more")


def test_why_a_lease_was_not_given_up_is_told_and_hides_no_error(
    server: ApiServer, api: LeaseApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, said in (
        (Conflict(), "somebody else has written it meanwhile"),
        (Unanswered("the API server does not answer: x"), "the API server does not answer: x"),
        (TypeError("fifteen"), "TypeError: fifteen"),
    ):
        server.give_up_for(api.name)
        elector = Elector(api, RULES, "p1_x")

        def refuse(_lease: Lease, error: Exception = error) -> Lease:
            raise error

        block = pytest.raises(KeyError, match="of the block")
        with capture_logs() as logs, block, elector.keep():
            eventually(elector.holds, what="it holds the Lease")
            monkeypatch.setattr(LeaseApi, "write", lambda _api, lease, r=refuse: r(lease))
            raise KeyError("of the block")
        monkeypatch.undo()
        (warning,) = [log for log in logs if "given up" in log["event"]]
        assert warning["reason"] == said
        assert warning["lease"] == "r-failover"


def test_page_status_and_metrics_tell_who_holds_it() -> None:
    seen = LeaseReport("r-failover", "r-failover-7d-x", held=False, transitions=3)
    snapshot = Snapshot(automatic=True, lease=seen)
    status = status_of(snapshot)["lease"]
    assert status == {
        "name": "r-failover",
        "holder": "r-failover-7d-x",
        "held": False,
        "transitions": 3,
        "problem": None,
    }
    assert "the Lease r-failover is held by r-failover-7d-x" in page(snapshot, 1.0)
    value = registry_of(lambda: snapshot).get_sample_value
    assert value("slotfailover_lease_held") == 0
    assert value("slotfailover_lease_holder_info", {"pod": "r-failover-7d-x"}) == 1
    assert value("slotfailover_lease_transitions") == 3
    assert status_of(Snapshot())["lease"] is None
    assert registry_of(Snapshot).get_sample_value("slotfailover_lease_held") is None


@pytest.mark.long
def test_only_who_may_lead_takes_the_lock_and_lets_go_of_it_else(
    local_trio: NewTrio, tmp_path: Path
) -> None:
    settings = load_settings(configuration(tmp_path, local_trio())).failover
    assert settings is not None
    with Cluster(settings, None) as one, Cluster(settings, None) as two:
        first = SharedStateStore(one, settings.journal_database, 60.0)
        second = SharedStateStore(two, settings.journal_database, 60.0)
        assert not first.look("a", Pause(), may_lead=False).leading
        assert second.look("a", Pause(), may_lead=True).leading
        assert not first.look("a", Pause(), may_lead=True).leading
        assert not second.look("a", Pause(), may_lead=False).leading
        assert first.look("a", Pause(), may_lead=True).leading
        first.close()
        second.close()


@pytest.mark.long
def test_a_leader_that_loses_the_lease_between_two_steps_does_not_go_on(
    local_trio: NewTrio, server: ApiServer, api: LeaseApi, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    watch = {**SETTINGS, "lease": {"name": api.name}}
    settings = load_settings(configuration(tmp_path, trio, watch=watch)).failover
    assert settings is not None
    elector = Elector(api, SOON, "p1_x")
    with Cluster(settings, None) as cluster, elector.keep():
        loop = Watch(settings, cluster, Request(), elector)
        with running(loop):
            eventually(lambda: loop.snapshot.leading, what="it leads")
            with no_subscription_changes(trio):
                promote(trio.primary, trio.standby)
                eventually(lambda: ask(trio.subscriber, WAITING), what="its first step is held up")
                server.answers_with = 503
                eventually(lambda: not elector.holds(), what="the Lease's deadline passes")
            eventually(lambda: "the Lease r-failover is not held" in told(loop), what="it stops")
            assert "the replica that holds the Lease does the rest" in told(loop)
            assert "the lock" not in told(loop)
            assert "resume" not in told(loop)
            assert not ask(trio.subscriber, "SELECT subenabled FROM pg_subscription", trio.dbname)
            leads_to = unquoted(ask(trio.subscriber, LEADS_TO, trio.dbname))
            assert f"port={trio.primary.port}" in leads_to
            assert loop.snapshot.counts.failures == 0
            server.answers_with = None
            eventually(lambda: loop.snapshot.counts.repoints == 1, what="who holds it goes on")
        write(trio.standby, trio.dbname, 1)
        await_equal(trio, trio.standby)


@contextlib.contextmanager
def running(loop: Watch) -> Iterator[None]:
    """The loop runs in a thread until the end of the block."""
    stop = Stop()
    thread = threading.Thread(target=loop.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(patient(60))


@contextlib.contextmanager
def no_subscription_changes(trio: Trio) -> Iterator[None]:
    """No subscription can be changed until the end of the block."""
    with psycopg.connect(trio.subscriber.conninfo(trio.dbname)) as session:
        session.execute("LOCK TABLE pg_subscription IN SHARE MODE")
        yield


def told(loop: Watch) -> str:
    """What the loop has told so far."""
    return "; ".join(event.text for event in loop.snapshot.events)
