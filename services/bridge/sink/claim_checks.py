"""Large values on their way to the object storage: stored before Kafka commits who refers to them.

    deposit          in the session's thread, while a row is encoded: the value is handed over
    (upload)         in threads; a storage that fails is tried again until the deadline
    require_stored   before the commit to Kafka: all that was deposited is stored, and the URI still
                     leads to the storage that has it

A value that waits takes memory, so that `deposit` waits, too, once there is too much. A crash
between the two leaves an object that nothing refers to, under the name that the next session uses.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Final

import structlog

from schemas.acceptance import Acceptance
from schemas.errors import ExitCode, Retryable, SettingsError, SlotbridgeError
from schemas.large_values import ClaimCheckSettings, Reference, sha256
from schemas.progress import ProgressRecord
from schemas.shaping import ShapingSettings
from services.bridge import metrics
from services.bridge.failpoints import reach
from services.bridge.sink.object_storage import object_storage
from services.bridge.sink.storage_folder import MountedAnew
from services.bridge.sink.storage_identity import (
    MARKER,
    OPERATION,
    TEST_OBJECT,
    ObjectStorage,
    judge_storage,
)
from services.waiter import Waiter

logger = structlog.get_logger(__name__)
_PAUSE_S: Final = 0.5
_LOOK_S: Final = 0.1
_KNOWN_S: Final = 600.0
"""For how long an object that was stored is not written again."""
_KNOWN_MAX: Final = 10_000
_REFRESH_S: Final = 3600.0
"""How old the marker of the storage gets while a session runs."""
_LOOKED: Final[dict[str, str]] = {}
"""The URI of a marker -> what this process knew of it after its last look."""


class ClaimChecks:
    """The large values of one session. `deposit` is for one thread, `require_stored` for any."""

    def __init__(
        self,
        settings: ClaimCheckSettings,
        storage: ObjectStorage | None = None,
        waiter: Waiter | None = None,
    ) -> None:
        self._storage = storage or object_storage(settings)
        self._waiter = waiter or Waiter()
        self._deadline_s = settings.deadline_ms / 1000
        self._bytes_max = settings.memory_bytes_max
        self._pool = ThreadPoolExecutor(settings.connections, thread_name_prefix="claim-check")
        self._changed = threading.Condition()
        self._pending: dict[str, int] = {}
        """Name -> size of values that are not stored yet."""
        self._bytes = 0
        self._known: OrderedDict[str, float] = OrderedDict()
        self._failure: SlotbridgeError | None = None
        self._cancelled = threading.Event()
        self._referred = False
        """Whether events of this session refer to objects, also to such that were stored before."""
        self._checked = self._refresh_due = 0.0

    def look(self) -> None:
        """See that the storage answers and takes an object, before the slot is taken.

        A bridge that waits for another one looks twice a second. So it stores and tells something
        only where the answer is another than at its last look. It stores nothing where the storage
        has no id, as a folder that is not mounted. Raise SlotbridgeError.
        """
        reason = "it has no id yet; nor was it tried whether it takes an object"
        try:
            seen = "id" if self._storage.identify() else "no id"
        except SlotbridgeError as error:
            if error.exit_code is not ExitCode.PRIVILEGE_MISSING:
                raise
            seen, reason = "denied", error.message  # of a missing id, too, without s3:ListBucket
        marker = self._storage.uri(MARKER)
        if _LOOKED.get(marker) == seen:
            return
        if seen != "no id":
            self._storage.put(TEST_OBJECT, b"")
        if seen != "id":
            logger.warning(
                "not judged before the slot is taken: whether this is the object storage of "
                "earlier large values",
                marker=marker,
                reason=reason,
            )
        _LOOKED[marker] = seen

    def confirm(self, noted: str | None, accepted: Acceptance, *, first: bool) -> str | None:
        """Return the id of the storage, to be noted, if it is the one that is `noted` in Kafka.

        Store an empty object, to check that the storage takes one. Then remove in a thread what
        killed processes have left there. Raise as `judge_storage`, which explains the arguments.
        """
        found = judge_storage(self._storage, noted, accepted, first=first)
        if found is not None:
            self._storage.begin(found)
            self._storage.refresh()
        self._checked = time.monotonic()
        self._refresh_due = self._checked + _REFRESH_S
        self._storage.put(TEST_OBJECT, b"")
        self._pool.submit(self._storage.remove_partial)
        return found

    def deposit(self, data: bytes) -> Reference:
        """Hand a value over. Wait while too many bytes wait for the storage; raise what it says."""
        name, size = sha256(data), len(data)
        self._referred = True
        while not self._take(name, size, data):
            self._waiter.turn()
        return Reference(self._storage.uri(name), size, name)

    def _take(self, name: str, size: int, data: bytes) -> bool:
        """Take a value, if it is not known and there is room; return False after a short wait."""
        with self._changed:
            self._raise_failure()
            if name in self._pending or self._is_known(name):
                return True
            if self._bytes and self._bytes + size > self._bytes_max:
                self._changed.wait(_LOOK_S)
                return False
            self._pending[name] = size
            self._bytes += size
            self._pool.submit(self._upload, name, data)
            return True

    def require_stored(self) -> None:
        """Return once all values that were deposited before are stored, and found by their URIs.

        Raise what prevents it, OtherStorage for one. Called before each commit to Kafka.
        """
        with self._changed:
            awaited = set(self._pending)
            while self._failure is None and not awaited.isdisjoint(self._pending):
                self._changed.wait(_LOOK_S)
            self._raise_failure()
        now = time.monotonic()
        if self._referred and now - self._checked >= self._storage.checked_every_s:
            self._patiently(self._storage.require_same)
            self._checked = time.monotonic()
        if now >= self._refresh_due:
            self._refresh_due = now + _REFRESH_S
            with suppress(RuntimeError):  # the pool has ended
                self._pool.submit(self._refresh)

    def cancel(self) -> None:
        """Let uploads and whoever waits for them give up."""
        self._cancelled.set()
        self._fail(_given_up())
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """End all work; an upload that is under way may or may not succeed."""
        self.cancel()
        self._storage.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: SlotbridgeError) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _is_known(self, name: str) -> bool:
        stored = self._known.get(name)
        return stored is not None and time.monotonic() - stored < _KNOWN_S

    def _upload(self, name: str, data: bytes) -> None:
        """Store one value, in a thread of the pool."""
        try:
            self._patiently(lambda: self._storage.put(name, data))
        except SlotbridgeError as error:
            self._fail(error)
            return
        except Exception as error:
            logger.exception("a large value could not be stored")
            self._fail(
                SlotbridgeError(
                    f"a large value could not be stored ({type(error).__name__})",
                    operation=OPERATION,
                    subject=self._storage.uri(name),
                    hint="report this with the log",
                )
            )
            return
        reach("claim stored")
        metrics.CLAIM_CHECKS.inc()
        metrics.CLAIM_CHECK_BYTES.inc(len(data))
        with self._changed:
            self._bytes -= self._pending.pop(name)
            self._known[name] = time.monotonic()
            self._known.move_to_end(name)
            if len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)
            self._changed.notify_all()

    def _refresh(self) -> None:
        """Keep the marker young, in a thread of the pool; a bridge without large values too."""
        try:
            self._storage.refresh()
        except Retryable as error:
            logger.warning("the age of the storage's id could not be set", reason=str(error))
        except SlotbridgeError as error:
            self._fail(error)

    def _patiently(self, ask: Callable[[], None]) -> None:
        """Ask the storage, again until the deadline while it does not answer."""
        deadline = time.monotonic() + self._deadline_s
        logged = False
        while True:
            try:
                ask()
            except MountedAnew:
                raise
            except Retryable as error:
                if time.monotonic() > deadline or self._cancelled.wait(_PAUSE_S):
                    raise
                if not logged:
                    logged = True
                    logger.warning("waiting for the object storage", reason=str(error))
            else:
                return


def open_claim_checks(
    settings: ClaimCheckSettings | None,
    shaping: ShapingSettings,
    resources: ExitStack,
    waiter: Waiter | None = None,
) -> ClaimChecks | None:
    """Return where large values go, None if none do. Raise SlotbridgeError without an answer.

    `resources` closes it. Nothing may be stored before `storage_id_of`.
    """
    if not shaping.claims:
        return None
    if settings is None:
        raise SettingsError(
            "the section `claim_check` is missing, which says where large values are stored",
            operation=OPERATION,
            hint="add claim_check.uri, or leave claim_check_bytes out of shaping.large_values",
        )
    found = ClaimChecks(settings, waiter=waiter)
    resources.callback(found.close)
    found.look()
    return found


def storage_id_of(
    checks: ClaimChecks | None, record: ProgressRecord | None, accepted: Acceptance
) -> str | None:
    """Return ProgressRecord.storage_id for the records to come. Raise as `ClaimChecks.confirm`.

    `record`: the last one, None before the first. Without large values its id is kept.
    """
    first = record is None
    noted = "" if record is None else record.settings.storage_id
    return noted if checks is None else checks.confirm(noted, accepted, first=first)


def _given_up() -> Retryable:
    return Retryable(
        "the session ends before large values are stored",
        operation=OPERATION,
        hint="nothing to do: the next session stores them",
    )
