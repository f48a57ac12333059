"""Which storage has the large values of a topic prefix: each has an id, which Kafka's record notes.

    noted in the record          found in the storage         then
    this id                      the same                     it is that storage
    an id                        another, or none             refused (OtherStorage)
    nothing, and none was used   an id, or none               its id, or a new one, is noted
    not known (not readable)     an id, or large values       its id, or a new one, is noted
    not known (not readable)     what the role may not see    the same, with a warning
    not known (not readable)     neither                      refused (OtherStorage)

An empty or foreign folder under the same path takes objects as any other: a share that is not
mounted, another volume in its place. Nobody would find them where events say that they are.
"""

import re
import uuid
from typing import Final, Protocol

import structlog

from schemas.acceptance import Acceptance
from schemas.errors import ExitCode, Retryable, SetupError
from schemas.large_values import sha256
from services.bridge.progress.errors import OtherStorage

logger = structlog.get_logger(__name__)

OPERATION: Final = "store a large value"
MARKER: Final = ".slotbridge-storage"
"""The object that has the storage's id, a UUID."""
ID_BYTES_MAX: Final = 100
"""As many bytes of a marker are read."""
TEST_OBJECT: Final = sha256(b"")
"""The name of the empty object that each start stores, whose content is not a value of a row."""
_OBJECT: Final = re.compile("[0-9a-f]{64}")
_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class ObjectStorage(Protocol):
    """A storage. `put` returns once it has the object for good; any thread may call it."""

    checked_every_s: float
    """Seconds for which `require_same` need not be asked again."""

    def identify(self) -> str | None:
        """Return the storage's id, None where it has none. Raise SlotbridgeError."""
        ...

    def claim(self, id_: str) -> None:
        """Give the storage this id, unless it has one: of two bridges, the first gives it."""
        ...

    def has_objects(self) -> bool | None:
        """Tell whether there is what `shows_use`; None where that can't be seen."""
        ...

    def begin(self, id_: str) -> None:
        """Take this id for that of the storage from now on."""
        ...

    def require_same(self) -> None:
        """Raise OtherStorage where the URI leads to another storage than it did at `begin`."""
        ...

    def refresh(self) -> None:
        """Make the marker young, for rules that remove by age; `require_same` comes first."""
        ...

    def uri(self, name: str) -> str:
        """Return the URI of the object of this name."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Store `data` under its SHA-256. Raise SlotbridgeError that says what to do."""
        ...

    def remove_partial(self) -> None:
        """Remove what killed processes have written in part. Raise nothing where that fails."""
        ...

    def close(self) -> None:
        """Close the connections to the storage."""
        ...


def judge_storage(
    storage: ObjectStorage, noted: str | None, accepted: Acceptance, *, first: bool
) -> str | None:
    """Return the id to note, of the storage that the session may use. Raise SlotbridgeError.

    `noted`: ProgressRecord.storage_id, `first`: there is no record yet. None where the role may not
    read the id: nothing is judged then.
    """
    found = None
    try:
        found = storage.identify()
    except SetupError as error:  # S3's answer, too, where the role may not see that none is there
        if noted or error.exit_code is not ExitCode.PRIVILEGE_MISSING:
            raise
    if noted and found != noted:
        other = OtherStorage(storage.uri(MARKER), noted, found)
        if not accepted.takes(other.token):
            raise other
    if noted is None and not first and found is None:
        _require_used(storage, accepted)
    return found or _claimed(storage)


def _require_used(storage: ObjectStorage, accepted: Acceptance) -> None:
    """Raise OtherStorage for a storage without a sign of use; warn where none can be seen."""
    used = storage.has_objects()
    if used is None:
        logger.warning(
            "not judged: whether this object storage has the earlier large values",
            marker=storage.uri(MARKER),
            hint="look for yourself: its id is taken for the right one from now on "
            "(with s3:ListBucket, the bridge looks at the first 1,000 objects)",
        )
    error = OtherStorage(storage.uri(MARKER), OtherStorage.UNKNOWN, None)
    if used is False and not accepted.takes(error.token):
        raise error


def _claimed(storage: ObjectStorage) -> str | None:
    """Return the id that a storage has by now, None if that can't be read. Raise Retryable."""
    try:
        storage.claim(str(uuid.uuid4()))
        found = storage.identify()
    except SetupError as error:
        if error.exit_code is not ExitCode.PRIVILEGE_MISSING:
            raise
        logger.warning(
            "not judged: whether this is the object storage of earlier large values",
            reason=error.message,
            hint=f"let the bridge read {storage.uri(MARKER)} (s3:GetObject)",
        )
        return None
    if found is None:
        raise Retryable(
            "the object storage does not have its id, which was just stored",
            operation=OPERATION,
            subject=storage.uri(MARKER),
            hint="nothing to do: the next session looks again",
            exit_code=ExitCode.STORAGE_UNREACHABLE,
        )
    logger.info("this object storage has the large values from now on", id=found)
    return found


def shows_use(name: str) -> bool:
    """Tell whether an object of this name is a large value, or the marker.

    The empty object is not enough: each start stores it, also where nothing is mounted.
    """
    return name == MARKER or (name != TEST_OBJECT and _OBJECT.fullmatch(name) is not None)


def id_of(uri: str, content: bytes) -> str:
    """Return the id that a marker has. Raise Retryable without content, SetupError for another."""
    if not content:  # a folder without hard links, between two steps of a bridge
        raise Retryable(
            "the object that tells which storage this is has no content: another bridge is at it, "
            "or was killed there",
            operation=OPERATION,
            subject=uri,
            hint="nothing to do while another bridge starts; if none does, remove the object, or "
            "put it back as it was",
            exit_code=ExitCode.STORAGE_UNREACHABLE,
        )
    found = content.decode("ascii", "replace").strip()
    if _ID.fullmatch(found):
        return found
    raise SetupError(
        "the object that tells which storage this is has no id",
        operation=OPERATION,
        subject=uri,
        hint="put it back as it was, or remove it if no bridge has used this storage",
    )


def unreachable(uri: str, reason: str, error: BaseException) -> Retryable:
    """Return the error of a storage that may answer later."""
    return Retryable(
        f"the object storage does not take an object ({reason or type(error).__name__})",
        operation=OPERATION,
        subject=uri,
        hint="check that the storage runs and can be reached, and check the section claim_check",
        exit_code=ExitCode.STORAGE_UNREACHABLE,
    )
