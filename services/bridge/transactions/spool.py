"""Changes of transactions until their commit: in memory first, compressed on disk beyond.

    file = { length:u32 zlib(frames) }          one a transaction; see `frames`

Owns its folder: whatever an earlier session left there is deleted, as the server sends it again
(streamed transactions) or Kafka has it (prepared ones).
"""

import errno
import fcntl
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from schemas.errors import ExitCode, Retryable, SetupError, SlotbridgeError
from services.bridge.descriptors import ERRNOS, no_descriptors
from services.bridge.failpoints import reach
from services.bridge.metrics import Held
from services.bridge.pgoutput.messages import Frame
from services.bridge.transactions.frames import HEAD, pack_frame, unpack_frames

_CHUNK = struct.Struct("!I")
_CHUNK_BYTES: Final = 512 * 1024
_COMPRESSION: Final = 1


class SpoolFull(Retryable):
    """The spool has reached its bound: go on without streaming, so that the server spills."""

    exit_code = ExitCode.DISK_FULL


def prepared_exceed_spool(error: SpoolFull) -> SetupError:
    """Return the error for a spool that prepared transactions alone have filled."""
    return SetupError(
        f"{error.message}, all of prepared transactions that are not decided",
        operation="spool a prepared transaction",
        subject=error.subject,
        hint="decide the transactions that `slotbridge status` lists, or raise "
        "bridge.spool_bytes_max",
        exit_code=ExitCode.DISK_FULL,
    )


class Spool:
    """Frames by top-level xid. `memory_bytes_max` over all of them; `bytes_max` on disk."""

    def __init__(self, folder: Path, *, memory_bytes_max: int, bytes_max: int) -> None:
        self._folder = folder
        self._memory_bytes_max = memory_bytes_max
        self._bytes_max = bytes_max
        self._held: dict[int, bytearray] = {}
        self._held_bytes = 0
        self._on_disk: dict[int, int] = {}
        self._lock = _locked(folder)
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
        except OSError as error:
            self._lock.close()
            raise _refused(error, folder) from error

    @property
    def bytes(self) -> int:
        """How much is kept, in memory and on disk."""
        return self._held_bytes + sum(self._on_disk.values())

    @property
    def xids(self) -> set[int]:
        """The transactions that have frames."""
        return self._held.keys() | self._on_disk.keys()

    def held(self) -> Held:
        """Return how many transactions are kept, and how large they are.

        Prepared ones have keys below 0 (services.bridge.transactions.prepared.waiting_place).
        """
        sizes = {xid: len(held) for xid, held in self._held.items()}
        for xid, size in self._on_disk.items():
            sizes[xid] = sizes.get(xid, 0) + size
        prepared = [size for xid, size in sizes.items() if xid < 0]
        return Held(
            open=len(sizes) - len(prepared),
            open_bytes=sum(sizes.values()) - sum(prepared),
            prepared=len(prepared),
            prepared_bytes=sum(prepared),
            spooled=len(self._on_disk),
            spooled_bytes=sum(self._on_disk.values()),
        )

    def append(self, xid: int, frame: Frame) -> None:
        """Keep one frame. Raise SpoolFull past `bytes_max`, SetupError when the disk is full."""
        held = self._held.setdefault(xid, bytearray())
        held += pack_frame(frame)
        self._held_bytes += HEAD.size + len(frame.payload)
        while self._held_bytes > self._memory_bytes_max:
            self._write(max(self._held, key=lambda other: len(self._held[other])))

    def replay(self, xid: int) -> Iterator[Frame]:
        """Yield the frames of a transaction in the order they came."""
        if xid in self._on_disk:
            try:
                with self._path(xid).open("rb") as file:
                    while head := file.read(_CHUNK.size):
                        chunk = zlib.decompress(file.read(_CHUNK.unpack(head)[0]))
                        for frame, _ in unpack_frames(chunk):
                            yield frame
            except OSError as error:
                raise _refused(error, self._folder) from error
        for frame, _ in unpack_frames(self._held.get(xid, b"")):
            yield frame

    def rename(self, xid: int, new: int) -> None:
        """Keep a transaction's frames under `new`, which has none."""
        if xid in self._held:
            self._held[new] = self._held.pop(xid)
        if xid in self._on_disk:
            self._on_disk[new] = self._on_disk.pop(xid)
            self._path(xid).rename(self._path(new))

    def drop(self, xid: int) -> None:
        """Delete the frames of a transaction."""
        self._held_bytes -= len(self._held.pop(xid, b""))
        if self._on_disk.pop(xid, None) is not None:
            self._path(xid).unlink(missing_ok=True)

    def close(self) -> None:
        """Delete the whole spool and release its lock."""
        self._held.clear()
        self._on_disk.clear()
        self._held_bytes = 0
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def _write(self, xid: int) -> None:
        """Move a transaction's frames from memory to its file. Raise SpoolFull beyond the limit."""
        held = self._held.pop(xid)
        self._held_bytes -= len(held)
        written = 0
        try:
            with self._path(xid).open("ab") as file:
                for chunk in _chunks(held):
                    packed = zlib.compress(chunk, _COMPRESSION)
                    written += file.write(_CHUNK.pack(len(packed)) + packed)
        except OSError as error:
            raise _refused(error, self._folder) from error
        self._on_disk[xid] = self._on_disk.get(xid, 0) + written
        reach("spooled")
        if sum(self._on_disk.values()) > self._bytes_max:
            raise SpoolFull(
                f"the spool holds more than {self._bytes_max} bytes",
                operation="spool a transaction in progress",
                subject=f"{len(self.xids)} transactions in {self._folder}",
                hint="the bridge continues with streaming off; raise bridge.spool_bytes_max",
            )

    def _path(self, xid: int) -> Path:
        return self._folder / f"{xid}.spool"


def _locked(folder: Path) -> IO[bytes]:
    """Own `folder` as long as the returned file is open; its rows are for nobody else's eyes."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_suffix(".lock").open("ab")
    except OSError as error:
        raise _refused(error, folder) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise Retryable(
            "another bridge uses this spool folder",
            operation="open the spool",
            subject=str(folder),
            hint="give each bridge its own bridge.spool_folder",
            exit_code=ExitCode.SLOT_IN_USE,
        ) from error
    return lock


def _chunks(frames: bytearray) -> Iterator[bytes]:
    """Cut at frame borders into pieces of about _CHUNK_BYTES."""
    start = pos = 0
    while pos < len(frames):
        pos += HEAD.size + HEAD.unpack_from(frames, pos)[2]
        if pos - start >= _CHUNK_BYTES or pos == len(frames):
            yield bytes(frames[start:pos])
            start = pos


def _refused(error: OSError, folder: Path) -> SlotbridgeError:
    """Return our error for one of the spool's file system."""
    if error.errno in ERRNOS:
        return no_descriptors("spool a transaction in progress")
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return SetupError(
        f"can't use {folder}: {error.strerror or error}",
        operation="spool a transaction in progress",
        hint="free disk space there, or lower bridge.spool_bytes_max"
        if full
        else "set bridge.spool_folder to a folder that the bridge may write to",
        exit_code=ExitCode.DISK_FULL if full else ExitCode.SERVER_SETTING,
    )
