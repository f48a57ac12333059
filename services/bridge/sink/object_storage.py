"""Object storages that claim checks name: a bucket of S3, or a folder; their errors as what to do.

    no answer, 5xx, throttled, I/O error    Retryable: the bridge waits
    401, 403, no credentials, EACCES        SetupError: credentials or grants
    no such bucket or folder                SetupError
    no space left                           SetupError
    the id in MARKER is another, or gone    OtherStorage

An object's name is the SHA-256 of its content, so writing it twice changes nothing. It is written
anew where it is there already: a lifecycle rule then counts its age from the last reference to it.
The id tells a storage from an empty or foreign one under the same URI (`storage_identity`).
"""

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from schemas.errors import ExitCode, SettingsError, SetupError, SlotbridgeError
from schemas.large_values import ClaimCheckSettings
from services.bridge.progress.errors import OtherStorage
from services.bridge.sink.storage_folder import Folder
from services.bridge.sink.storage_identity import (
    ID_BYTES_MAX,
    MARKER,
    OPERATION,
    ObjectStorage,
    id_of,
    shows_use,
    unreachable,
)

_BUCKET_CHECK_S: Final = 30.0
_LISTED: Final = 1_000
"""Objects of one answer, the most that S3 gives."""
_CONNECT_S: Final = 5
_READ_S: Final = 20
_DENIED: Final = (401, 403)
_PASSING: Final = (408, 409, 425, 429)
_SERVER_ERROR: Final = 500
_NOT_FOUND: Final = 404
_THERE: Final = "PreconditionFailed"
_CONFLICT: Final = "ConditionalRequestConflict"
_NO_CONDITIONS: Final = "NotImplemented"
_CONFLICT_PAUSES_S: Final = (0.1, 0.2, 0.4)
"""Seconds before a PUT on a condition is tried again while another bridge's is under way."""


def object_storage(settings: ClaimCheckSettings) -> ObjectStorage:
    """Return the storage of the settings, which is not asked anything yet."""
    if settings.uri.startswith("s3://"):
        return Bucket(settings)
    return Folder(settings.uri)


class Bucket:
    """A bucket of S3, or of a service with S3's API."""

    checked_every_s = _BUCKET_CHECK_S

    def __init__(self, settings: ClaimCheckSettings) -> None:
        parts = urlsplit(settings.uri)
        self._uri = settings.uri.rstrip("/")
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/") + "/" if parts.path.strip("/") else ""
        self._client = _client(settings)
        self._id = ""

    def uri(self, name: str) -> str:
        """Return the URI of the object of this name."""
        return f"{self._uri}/{name}"

    def identify(self) -> str | None:
        """Return the id in the marker; None where there is none, and the service says so."""
        with self._asked("NoSuchKey"):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + MARKER)
            return id_of(self.uri(MARKER), answer["Body"].read(ID_BYTES_MAX))
        return None

    def claim(self, id_: str) -> None:
        """Store the marker on the condition that there is none, if the service knows conditions.

        Raise Retryable where another bridge's marker is being stored all the while. On a service
        without conditions, the later one of two bridges may replace the id of the earlier one.
        """
        key, content = self._prefix + MARKER, f"{id_}\n".encode()
        for pause_s in _CONFLICT_PAUSES_S:
            with self._asked(_THERE, _CONFLICT, _NO_CONDITIONS) as passed:
                self._put(key, content, IfNoneMatch="*")
            if passed != [_CONFLICT]:
                break
            time.sleep(pause_s)
        else:
            with self._asked(_THERE):
                self._put(key, content, IfNoneMatch="*")
        if passed == [_NO_CONDITIONS] and self.identify() is None:
            with self._asked():
                self._put(key, content)

    def has_objects(self) -> bool | None:
        """Tell whether large values or the marker are among the prefix's first _LISTED objects.

        Return None without the right to list them, or where only more objects could tell.
        """
        with self._asked("AccessDenied"):
            found = self._client.list_objects_v2(
                Bucket=self._bucket, Prefix=self._prefix, Delimiter="/", MaxKeys=_LISTED
            )
            keys = (item["Key"].removeprefix(self._prefix) for item in found.get("Contents", ()))
            return any(map(shows_use, keys)) or (None if found.get("IsTruncated") else False)
        return None

    def begin(self, id_: str) -> None:
        """Compare the marker with this id from now on."""
        self._id = id_

    def require_same(self) -> None:
        """Read the marker, and compare its id with that of the session."""
        found = self.identify() if self._id else ""
        if found != self._id:
            raise OtherStorage(self.uri(MARKER), self._id, found)

    def refresh(self) -> None:
        """Store the marker anew once its id was compared."""
        self.require_same()
        if self._id:
            with self._asked():
                self._put(self._prefix + MARKER, f"{self._id}\n".encode())

    def put(self, name: str, data: bytes) -> None:
        """Store the object; the service compares its content with the SHA-256 in its name."""
        checksum = base64.b64encode(bytes.fromhex(name)).decode()
        with self._asked():
            self._put(self._prefix + name, data, ChecksumSHA256=checksum)

    def _put(self, key: str, data: bytes, **more: str) -> None:
        self._client.put_object(Bucket=self._bucket, Key=key, Body=data, **more)

    @contextmanager
    def _asked(self, *passed: str) -> Iterator[list[str]]:
        """Translate the errors of a request; the codes `passed` end the block without one.

        Yield a list, which then has the code that was passed, if any.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        answers: list[str] = []
        try:
            yield answers
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code")
            if code not in passed:
                raise self._refused(error) from error
            answers.append(code)
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


def _denied(uri: str, reason: str) -> SetupError:
    return SetupError(
        f"the object storage denies access ({reason})",
        operation=OPERATION,
        subject=uri,
        hint="correct claim_check.access_key_id and claim_check.secret_access_key (or what AWS's "
        "own tools find), and grant s3:PutObject on the bucket's prefix and s3:GetObject on its "
        f"{MARKER}; without s3:ListBucket, a missing object is answered in the same way",
        exit_code=ExitCode.PRIVILEGE_MISSING,
    )


def _client(settings: ClaimCheckSettings) -> Any:
    """Return boto3's client for S3. Raise SetupError where boto3 is not installed."""
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
