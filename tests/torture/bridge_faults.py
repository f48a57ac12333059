"""What is done to the bridge's process, and other bridges beside it."""

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import yaml

from schemas.errors import ExitCode
from tests.providers.waiting import eventually
from tests.torture.bank import NARROW
from tests.torture.checker import Finding
from tests.torture.faults import Fault
from tests.torture.supervisor import Supervised
from tests.torture.torture_run import TortureRun

FAILPOINT_WAIT_S: Final = 8.0
SEAMS_WAIT_S: Final = 60.0
_STREAMING_S: Final = 1.5
_LOOK_S: Final = 0.05
_TAKE_OVER_S: Final = 60.0
_REFUSED_S: Final = 120.0
_DISAGREE: Final = ExitCode.WITNESSES_DISAGREE


def kill(run: TortureRun, _fault: Fault) -> None:
    """SIGKILL at a random moment."""
    run.supervised.kill()


def crash(run: TortureRun, fault: Fault) -> None:
    """Each bridge in turn runs into its failpoint, or is killed without having met it."""
    _crash(run, fault.points)


def seams(run: TortureRun, fault: Fault) -> None:
    """The same for the seams of a snapshot's chunks: it takes a session a while to come there."""
    kills = run.supervised.ends.sigkills
    run.supervised.arm(*fault.points)
    if not run.supervised.await_end(kills + 1 + len(fault.points), SEAMS_WAIT_S):
        run.supervised.kill()


def terminated(run: TortureRun, fault: Fault) -> None:
    """SIGTERM, and it runs into its failpoint while it stops."""
    _crash(run, fault.points, terminate=True)


def freeze(run: TortureRun, fault: Fault) -> None:
    """SIGSTOP for a while."""
    run.supervised.freeze()
    time.sleep(2 * fault.seconds)
    run.supervised.thaw()


def disconnect(run: TortureRun, _fault: Fault) -> None:
    """The primary ends its connections."""
    run.terminate_bridge()


def lose_leader_inside(run: TortureRun, fault: Fault) -> None:
    """A leader dies while a Kafka transaction is open, or being decided.

    Then the bridge goes on with it, or it dies too.
    """
    moments = random.Random(f"{fault}")
    stop_at(run, moments.choice(["before kafka commit:2", "committing:2"]))
    with run.brokers.without_a_leader(fault, run.bridge.prefix):
        if moments.random() < 0.5:
            run.supervised.kill()
        run.supervised.thaw()
        time.sleep(2 * fault.seconds)


def rival(run: TortureRun, fault: Fault) -> None:
    """The bridge stops dead with a Kafka transaction open; another takes over; it goes on."""
    stop_at(run, "before kafka commit:2")
    run.terminate_bridge()
    with another_bridge(run, "rival", {}) as other:
        seen = _sessions_of(other)
        other.start()
        try:
            eventually(
                lambda: other.operator_needed is not None or _sessions_of(other) > seen,
                what="the rival streams",
                timeout_s=_TAKE_OVER_S,
            )
            time.sleep(fault.seconds / 4)
            run.supervised.thaw()
            time.sleep(fault.seconds)
        finally:
            run.supervised.thaw()
    run.rival_kills += other.ends.sigkills
    if other.operator_needed is not None:
        run.supervised.operator_needed = other.operator_needed


def stray(run: TortureRun, fault: Fault) -> None:
    """Another bridge that must be refused by name; what is wrong with it is drawn."""
    moments, slot, disagree = random.Random(f"{fault}"), run.bridge.slot, _DISAGREE
    match moments.choice(["slot", "publication", "database" if run.foreign else "slot"]):
        case "slot":
            words = f"belong to slot {slot}"
            refused(run, "second-slot", {"slot": f"{slot}_2"}, disagree, words)
        case "publication":  # it takes the place of the bridge, which stands still
            stop_at(run, "before kafka commit:2")
            run.terminate_bridge()
            words = f"they are of publication {NARROW} now"
            refused(run, "narrow", {"publication": NARROW}, disagree, words)
            run.supervised.thaw()
        case _:
            assert run.foreign is not None
            other = {"conninfo": run.foreign.conninfo(run.dbname)}
            refused(
                run, "foreign", other, ExitCode.WRONG_DATABASE, "the database has system identifier"
            )


def refused(
    run: TortureRun, name: str, source: dict[str, Any], code: ExitCode, words: str, **bridge: Any
) -> None:
    """Start another bridge, configured so: it must end with `code` and `words` in its error.

    Meanwhile it has not fenced the right one.
    """
    fenced = run.supervised.ends.codes[ExitCode.FENCED]
    with another_bridge(run, name, source, **bridge) as other:
        seen = _written(other).count(words)
        other.start()
        eventually(
            lambda: other.operator_needed is not None or _sessions_of(other) > 0,
            what=f"refused: {words}",
            timeout_s=_REFUSED_S,
        )
    if other.operator_needed != code or _written(other).count(words) <= seen:
        what = f"{name}: {other.operator_needed} instead of {code:d}, {words!r}"
        run.findings.append(Finding("accepted", what))
    if run.supervised.ends.codes[ExitCode.FENCED] > fenced:
        run.findings.append(Finding("accepted", f"{name}: it has fenced the right bridge"))


def _sessions_of(bridge: Supervised) -> int:
    """How many sessions have come to stream; "not streaming yet" is none."""
    return _written(bridge).count("[info     ] streaming")


def _written(bridge: Supervised) -> str:
    return bridge.log.read_text(encoding="utf-8") if bridge.log.exists() else ""


@contextlib.contextmanager
def another_bridge(
    run: TortureRun, name: str, source: dict[str, Any], **bridge: Any
) -> Iterator[Supervised]:
    """One that is configured like the bridge, but for some settings; not started, ended after."""
    document = yaml.safe_load(run.bridge.config.read_text(encoding="utf-8"))
    folder = run.folder / name
    folder.mkdir(exist_ok=True)
    document["source"] |= source
    document["bridge"] |= {"spool_folder": str(folder), **bridge}
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    other = Supervised(config, folder / f"{name}.log", sabotage=run.sabotage)
    try:
        yield other
    finally:
        other.end()


def stop_at(run: TortureRun, failpoint: str) -> None:
    """Let the bridge stand still there, with a Kafka transaction open, if it comes to that."""
    run.supervised.arm(f"{failpoint}:stop")
    with contextlib.suppress(AssertionError):
        eventually(run.supervised.stopped, what="it has stopped", timeout_s=FAILPOINT_WAIT_S)
    run.supervised.freeze()


def _crash(run: TortureRun, points: Sequence[str], *, terminate: bool = False) -> None:
    kills = run.supervised.ends.sigkills
    run.supervised.arm(*points)
    run.supervised.await_end(kills + 1, FAILPOINT_WAIT_S)
    if terminate:
        run.bridge_streams()
        run.supervised.terminate()
    for number, _ in enumerate(points, 2):
        if not _ends(run, kills + number):
            run.supervised.kill()


def _ends(run: TortureRun, kills: int) -> bool:
    """Whether there were so many, before the bridge has streamed for long enough."""
    sessions = _sessions(run)
    give_up = time.monotonic() + FAILPOINT_WAIT_S
    while not run.supervised.await_end(kills, _LOOK_S):
        if _sessions(run) != sessions:
            sessions = _sessions(run)
            give_up = time.monotonic() + _STREAMING_S
        if time.monotonic() > give_up:
            return False
    return True


def _sessions(run: TortureRun) -> int:
    passages = run.supervised.passages()
    return passages["started"] + passages["resumed inside"]
