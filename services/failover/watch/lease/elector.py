"""A thread that keeps the Lease, or waits for it; others ask it whether this replica holds it.

It has a thread of its own because an observation of dead servers takes longer than the lease.
"""

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol

import structlog

from schemas.watch_settings import LeaseSettings
from services.failover.watch.lease.election import Election, Lease, Rules
from services.failover.watch.lease.lease_api import Conflict, Unanswered, lease_api

logger = structlog.get_logger(__name__)

_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine is suspended, as the other replicas' clocks do."""


class Leases(Protocol):
    """The object, as `lease_api.LeaseApi` has it."""

    name: str

    def read(self) -> Lease:
        """Return the Lease object."""

    def write(self, lease: Lease) -> Lease:
        """Replace or create the object."""


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """The state of the Lease, for the page and the metrics."""

    name: str
    holder: str
    """The pod that holds it as far as was read, "" for none."""
    held: bool
    """By this replica, and for certain."""
    transitions: int
    problem: str = ""
    """Why the last request failed."""

    @property
    def elsewhere(self) -> str:
        """Why this replica does not lead, in a sentence."""
        if self.problem:
            return f"the Lease {self.name} is not held for certain: {self.problem}"
        return f"the Lease {self.name} is held by {self.holder or 'nobody yet'}"

    def as_json(self) -> dict[str, object]:
        """Return the document for /v1/status."""
        return {
            "name": self.name,
            "holder": self.holder or None,
            "held": self.held,
            "transitions": self.transitions,
            "problem": self.problem or None,
        }


class NoLease:
    """Where no Lease elects: the lock on the primary alone does."""

    def holds(self) -> bool:
        """Return True: every replica may take the lock."""
        return True

    def report(self) -> LeaseReport | None:
        """Return None: there is nothing to tell."""
        return None

    def keep(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing while the block runs."""
        return contextlib.nullcontext()


class Elector:
    """One candidate. `keep` starts and ends its thread; `holds` and `report` from any thread."""

    def __init__(self, leases: Leases, rules: Rules, identity: str) -> None:
        self._leases = leases
        self._retry_s = rules.retry_s
        self._election = Election(identity, rules, _now_s, lambda: datetime.now(UTC))
        self._problem = ""

    def holds(self) -> bool:
        """Tell whether this replica holds the Lease now; False once the deadline has passed."""
        return self._election.holds()

    def report(self) -> LeaseReport:
        """Return the present state of the Lease."""
        lease = self._election.candidate.lease
        pod = lease.holder.rpartition("_")[0] or lease.holder
        return LeaseReport(self._leases.name, pod, self.holds(), lease.transitions, self._problem)

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """Keep the Lease while the block runs, then give it up so that another can have it."""
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,), name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self._give_up()

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._note(self._attempt())
            stop.wait(self._retry_s)

    def _attempt(self) -> str:
        """Ask the API server what the election wants; return the problem, "" for none."""
        requests = self._election.attempt()
        try:
            wish = next(requests)
            while True:
                answer = self._leases.read() if wish is None else self._leases.write(wish)
                wish = requests.send(answer)
        except StopIteration:
            return ""
        except Conflict:  # another was faster: the next attempt reads who
            self._election.failed()
        except Unanswered as error:
            self._election.failed()
            return str(error)
        except Exception as error:  # else the thread would end, and nobody would know
            self._election.failed()
            return f"the Lease can't be made sense of: {type(error).__name__}: {error}"
        return ""

    def _give_up(self) -> None:
        """Write the Lease as given up; log where that fails, as it then runs out by itself."""
        last = self._election.give_up()
        if last is None:
            return
        try:
            self._leases.write(last)
        except Conflict:
            self._log_kept("somebody else has written it meanwhile")
        except Unanswered as error:
            self._log_kept(str(error))
        except Exception as error:  # else it would hide why the block ended
            self._log_kept(f"{type(error).__name__}: {error}")

    def _log_kept(self, reason: str) -> None:
        name = self._leases.name
        logger.warning("the Lease was not given up; it expires", lease=name, reason=reason)

    def _note(self, problem: str) -> None:
        """Log when the API server stops or begins to answer."""
        if problem and not self._problem:
            logger.warning(
                "the API server can't be asked for the Lease",
                lease=self._leases.name,
                reason=problem,
            )
        elif self._problem and not problem:
            logger.info("the API server answers for the Lease again", lease=self._leases.name)
        self._problem = problem


def election_of(settings: LeaseSettings, environment: Mapping[str, str]) -> Elector | NoLease:
    """Return the election of a leader among the replicas, besides the lock on the primary.

    Raise SettingsError where a Lease is wanted outside of Kubernetes.
    """
    if not settings.name:
        return NoLease()
    rules = Rules.of(settings)
    leases = lease_api(settings.name, environment, timeout_s=rules.deadline_s / 2)
    return Elector(leases, rules, f"{socket.gethostname()}_{uuid.uuid4()}")


def _now_s() -> float:
    return time.clock_gettime(_CLOCK)
