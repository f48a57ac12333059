"""Object storages that claim checks name: a bucket of S3, or a folder; their errors as what to do.

    no answer, 5xx, throttled, I/O error    Retryable: the bridge waits
    401, 403, no credentials, EACCES        SetupError: credentials or grants
    no such bucket or folder                SetupError
    no space left                           SetupError

An object's name is the SHA-256 of its content, so writing it twice changes nothing. It is written
anew where it is there already: a lifecycle rule then counts its age from the last reference to it.
"""

import base64
import errno
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlsplit

from schemas.errors import ExitCode, Retryable, SettingsError, SetupError, SlotbridgeError
from schemas.large_values import ClaimCheckSettings, sha256

OPERATION: Final = "store a large value"
_FILE_MODE: Final = 0o640
_PARTIAL: Final = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}")
"""Names of files that are not written whole."""
_STALE_S: Final = 3600
_CONNECT_S: Final = 5
_READ_S: Final = 20
_DENIED: Final = (401, 403)
_PASSING: Final = (408, 409, 425, 429)
_SERVER_ERROR: Final = 500
_NOT_FOUND: Final = 404
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_ACCESS: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FOLDER: Final = (errno.ENOENT, errno.ENOTDIR)


class ObjectStorage(Protocol):
    """A storage. `put` returns once it has the object for good; any thread may call it."""

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


def object_storage(settings: ClaimCheckSettings) -> ObjectStorage:
    """Return the storage of the settings, which is not asked anything yet."""
    if settings.uri.startswith("s3://"):
        return Bucket(settings)
    return Folder(settings.uri)


class Folder:
    """A folder whose files are objects."""

    def __init__(self, uri: str) -> None:
        self._uri = uri.rstrip("/")
        self._path = Path(unquote(urlsplit(uri).path))
        self._closed = False

    def uri(self, name: str) -> str:
        """Return the URI of the file of this name."""
        return f"{self._uri}/{name}"

    def put(self, name: str, data: bytes) -> None:
        """Write the file, and the folder's entry of it, to disk."""
        made = self._path / f".{name}.{secrets.token_hex(8)}"
        try:
            try:
                with open(made, "xb", opener=_opened) as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                made.rename(self._path / name)
            except BaseException:
                with suppress(OSError):
                    made.unlink()
                raise
            folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._failed(error) from error

    def remove_partial(self) -> None:
        """Remove files that were begun an hour before the newest start, by the folder's clock."""
        with suppress(OSError), os.scandir(self._path) as entries:
            now = (self._path / sha256(b"")).stat().st_mtime
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


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE_MODE)


class Bucket:
    """A bucket of S3, or of a service with S3's API."""

    def __init__(self, settings: ClaimCheckSettings) -> None:
        parts = urlsplit(settings.uri)
        self._uri = settings.uri.rstrip("/")
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/") + "/" if parts.path.strip("/") else ""
        self._client = _client(settings)

    def uri(self, name: str) -> str:
        """Return the URI of the object of this name."""
        return f"{self._uri}/{name}"

    def put(self, name: str, data: bytes) -> None:
        """Store the object; the service compares its content with the SHA-256 in its name."""
        from botocore.exceptions import BotoCoreError, ClientError

        checksum = base64.b64encode(bytes.fromhex(name)).decode()
        try:
            self._client.put_object(
                Bucket=self._bucket,
                Key=self._prefix + name,
                Body=data,
                ChecksumSHA256=checksum,
            )
        except ClientError as error:
            raise self._refused(error) from error
        except (BotoCoreError, OSError) as error:
            raise self._failed(error) from error

    def remove_partial(self) -> None:
        """Do nothing: the service keeps no part of an object."""

    def close(self) -> None:
        """Close the connections to the storage."""
        self._client.close()

    def _refused(self, error: Any) -> SlotbridgeError:
        """Return what to do about an answer of the service."""
        said = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code, message = str(said.get("Code", "")), str(said.get("Message", ""))
        reason = f"status {status}, {code}: {message}"
        if status in _PASSING or status >= _SERVER_ERROR or code in ("SlowDown", "RequestTimeout"):
            return unreachable(self._uri, reason, error)
        if status in _DENIED or code in ("ExpiredToken", "InvalidToken"):
            return _denied(self._uri, reason)
        hint = "check claim_check.uri, endpoint_url and region"
        if status == _NOT_FOUND:
            hint = "make the bucket, or correct claim_check.uri or endpoint_url"
        return SetupError(
            f"the object storage refuses an object ({reason})",
            operation=OPERATION,
            subject=self._uri,
            hint=hint,
            exit_code=ExitCode.SERVER_SETTING,
        )

    def _failed(self, error: Exception) -> SlotbridgeError:
        """Return what to do where there was no answer."""
        from botocore import exceptions

        without = (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)
        if isinstance(error, without):
            return _denied(self._uri, str(error))
        settings = (exceptions.NoRegionError, exceptions.ParamValidationError)
        if isinstance(error, settings):
            return SettingsError(
                f"the object storage can't be asked: {error}",
                operation=OPERATION,
                subject=self._uri,
                hint="correct the section claim_check",
            )
        return unreachable(self._uri, type(error).__name__, error)


def unreachable(uri: str, reason: str, error: BaseException) -> Retryable:
    """Return the error of a storage that may answer later."""
    return Retryable(
        f"the object storage does not take an object ({reason or type(error).__name__})",
        operation=OPERATION,
        subject=uri,
        hint="check that the storage runs and can be reached, and check the section claim_check",
        exit_code=ExitCode.STORAGE_UNREACHABLE,
    )


def _denied(uri: str, reason: str) -> SetupError:
    return SetupError(
        f"the object storage denies access ({reason})",
        operation=OPERATION,
        subject=uri,
        hint="correct claim_check.access_key_id and claim_check.secret_access_key (or what AWS's "
        "own tools find), and grant s3:PutObject on the bucket's prefix",
        exit_code=ExitCode.PRIVILEGE_MISSING,
    )


def _client(settings: ClaimCheckSettings) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise SetupError(
            "the package boto3 is missing, which stores objects in S3",
            operation=OPERATION,
            subject=settings.uri,
            hint="install slotbridge[s3]: requirements/run.txt has its packages",
            exit_code=ExitCode.PROGRAM_MISSING,
        ) from error
    options: dict[str, Any] = {}
    if settings.access_key_id:
        options["aws_access_key_id"] = settings.access_key_id
        options["aws_secret_access_key"] = settings.secret_access_key.get_secret_value()
    if settings.ca_file is not None:
        options["verify"] = str(settings.ca_file)
    return boto3.session.Session().client(
        "s3",
        endpoint_url=settings.endpoint_url,
        region_name=settings.region or None,
        config=Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            retries={"mode": "standard", "total_max_attempts": 1},
            max_pool_connections=settings.connections,
            s3={"addressing_style": "path" if settings.endpoint_url else "auto"},
        ),
        **options,
    )
