"""A folder as the object storage of large values: each access opens it anew, and compares its id.

mounted over, or unmounted      the folder under the path has no id, or another: OtherStorage
mounted again, or a copy of it  the id is the same, the folder is not: the session ends, and the
                                next one stores its values again
"""

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from schemas.errors import ExitCode, Retryable, SetupError, SlotbridgeError
from schemas.large_values import sha256
from services.bridge.progress.errors import OtherStorage
from services.bridge.sink.storage_identity import (
    ID_BYTES_MAX,
    MARKER,
    OPERATION,
    TEST_OBJECT,
    id_of,
    shows_use,
    unreachable,
)

_FILE_MODE: Final = 0o640
_MARKER_MODE: Final = 0o644
_PARTIAL: Final = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}")
"""Names of files that are not written whole."""
_STALE_S: Final = 3600
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ACCESS: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FOLDER: Final = (errno.ENOENT, errno.ENOTDIR)
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class MountedAnew(Retryable):
    """The folder is another one with the same id: what this session has stored may not be there."""

    exit_code = ExitCode.STORAGE_UNREACHABLE


class Folder:
    """A folder whose files are objects.

    Each `put` opens the folder anew and compares its id: what was stored in a folder that was
    mounted over, or beneath a mount that has gone, would not be found by its URI.
    """

    checked_every_s = 0.0

    def __init__(self, uri: str) -> None:
        self._uri = uri.rstrip("/")
        self._path = Path(unquote(urlsplit(uri).path))
        self._closed = False
        self._id = ""
        self._place: tuple[int, int] | None = None

    def uri(self, name: str) -> str:
        """Return the URI of the file of this name."""
        return f"{self._uri}/{name}"

    def identify(self) -> str | None:
        """Return the id in the folder's marker, None without one."""
        with self._opened(compare=False) as folder:
            return self._id_in(folder)

    def claim(self, id_: str) -> None:
        """Write the marker whole, unless there is one."""
        with self._opened(compare=False) as folder:
            content = f"{id_}\n".encode()
            made = self._write(folder, sha256(content), content, _MARKER_MODE)
            with suppress(FileExistsError):
                _name_marker(folder, made)
            with suppress(OSError):
                os.unlink(made, dir_fd=folder)
            os.fsync(folder)

    def has_objects(self) -> bool:
        """Tell whether the folder has the file of a large value, or the marker."""
        with self._opened(compare=False), os.scandir(self._path) as entries:
            return any(shows_use(entry.name) for entry in entries)

    def begin(self, id_: str) -> None:
        """Compare the folder with this id, and with the present device and inode, from now on."""
        with self._opened(compare=False) as folder:
            found = os.fstat(folder)
        self._id, self._place = id_, (found.st_dev, found.st_ino)

    def require_same(self) -> None:
        """Open the folder by its path, and compare its id with that of the session."""
        with self._opened():
            pass

    def refresh(self) -> None:
        """Set the marker's time to now."""
        with self._opened() as folder, suppress(PermissionError):
            os.utime(MARKER, dir_fd=folder)

    def put(self, name: str, data: bytes) -> None:
        """Write the file, and the folder's entry of it, to disk."""
        with self._opened() as folder:
            made = self._write(folder, name, data)
            try:
                os.rename(made, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(made, dir_fd=folder)
                raise
            os.fsync(folder)

    @contextmanager
    def _opened(self, *, compare: bool = True) -> Iterator[int]:
        """Open the folder; `compare` its id. Translate the errors of the block."""
        try:
            folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if compare and self._id:
                    self._compare(folder)
                yield folder
            finally:
                os.close(folder)
        except OSError as error:
            raise self._failed(error) from error

    def _compare(self, folder: int) -> None:
        """Raise where the folder is another storage than at the start, or was mounted anew."""
        found = self._id_in(folder)
        if found != self._id:
            raise OtherStorage(self.uri(MARKER), self._id, found)
        place = os.fstat(folder)
        if (place.st_dev, place.st_ino) != self._place:
            raise MountedAnew(
                "the folder was mounted or moved while the session stored values in it",
                operation=OPERATION,
                subject=self._uri,
                hint="nothing to do: the next session stores them again",
            )

    def _id_in(self, folder: int) -> str | None:
        """Return the id that the folder's marker has, None without a marker."""
        try:
            file = os.open(MARKER, os.O_RDONLY, dir_fd=folder)
        except FileNotFoundError:
            return None
        try:
            return id_of(self.uri(MARKER), os.read(file, ID_BYTES_MAX))
        finally:
            os.close(file)

    def _write(self, folder: int, name: str, data: bytes, mode: int = _FILE_MODE) -> str:
        """Write a file of a name of its own to disk; return that name."""
        made = f".{name}.{secrets.token_hex(8)}"

        def opened(path: str, flags: int) -> int:
            return os.open(path, flags, mode, dir_fd=folder)

        try:
            with open(made, "xb", opener=opened) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with suppress(OSError):
                os.unlink(made, dir_fd=folder)
            raise
        return made

    def remove_partial(self) -> None:
        """Remove files that were begun an hour before the newest start, by the folder's clock."""
        with suppress(OSError), os.scandir(self._path) as entries:
            now = (self._path / TEST_OBJECT).stat().st_mtime
            for entry in entries:
                if self._closed:
                    return
                if _PARTIAL.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    with suppress(OSError):
                        if entry.stat(follow_symlinks=False).st_mtime < now - _STALE_S:
                            Path(entry.path).unlink()

    def close(self) -> None:
        """End `remove_partial`; no file stays open."""
        self._closed = True

    def _failed(self, error: OSError) -> SlotbridgeError:
        """Return our error for one of the file system."""
        reason = os.strerror(error.errno or 0)
        if error.errno in _NO_SPACE:
            hint, code = "make room there; then restart the bridge", ExitCode.DISK_FULL
        elif error.errno in _NO_ACCESS:
            hint = "let the bridge's user write into the folder"
            code = ExitCode.PRIVILEGE_MISSING
        elif error.errno in _NO_FOLDER:
            hint = "mount or make the folder, or correct claim_check.uri"
            code = ExitCode.SERVER_SETTING
        else:
            return unreachable(self._uri, reason, error)
        return SetupError(
            f"the folder does not take an object: {reason}",
            operation=OPERATION,
            subject=self._uri,
            hint=hint,
            exit_code=code,
        )


def _name_marker(folder: int, made: str) -> None:
    """Make a whole file the marker. Raise FileExistsError where the folder has one.

    Without hard links, an empty file takes the name first, which only one bridge can make.
    """
    try:
        os.link(made, MARKER, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        os.close(os.open(MARKER, flags, _MARKER_MODE, dir_fd=folder))
        try:
            os.rename(made, MARKER, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(OSError):
                os.unlink(MARKER, dir_fd=folder)
            raise
