"""A schema registry with Confluent's API: schemas registered once, their ids remembered.

    answers late, 5xx, 429, no connection,   waited for, then Retryable: the session ends, nothing
    200 with a page of a proxy               is lost, and the next session begins by waiting
    409                                      another request registers the schema at the same time:
                                             its id is looked up; else not compatible, or refused
    422                                      the schema, or the subject's name, is refused
    401, 403                                 credentials
    other                                    refused, with the registry's own words

Registering is idempotent: a crash between it and the first record that has the id loses nothing. A
registry that is restored from an older copy may give a schema another id: each session asks anew.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog

from schemas.errors import ExitCode, Retryable, SetupError, SlotbridgeError
from schemas.registry import RegistrySettings, SubjectNaming
from services.waiter import Waiter

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import (
        Schema,
        SchemaRegistryClient,
        SchemaRegistryError,
    )

logger = structlog.get_logger(__name__)

_ATTEMPT_S: Final = 5
_PAUSE_S: Final = 0.5
_FOLLOWS_S: Final = 10
_LACKS_S: Final = 60
"""How long a schema that the registry lacks is asked for, and is not asked for again after that."""
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 401, 403, 404
_CONFLICT, _INVALID = 409, 422
_CONFLICTS_MAX: Final = 3
"""How often a schema is sent that the registry refuses (409), but calls compatible."""
_NO_SUBJECT: Final = 40401
_NO_SCHEMA: Final = 40403
"""The registry's own codes; a 404 without one is a proxy's, or of a request it does not know."""
_OWN_CODES: Final = 40_000
_PASSING: Final = (408, 429)
_TRANSITIVE: Final = "_TRANSITIVE"
_SERVER_ERROR: Final = 500
_NO_ANSWER: Final = (ValueError, LookupError, TypeError, AttributeError)
"""What the client raises for an answer that is not a registry's."""
_REASON_CHARACTERS_MAX: Final = 500


_Answer = TypeVar("_Answer")


class SchemaRegistry:
    """The registry client of one session; it remembers the ids of registered schemas."""

    def __init__(self, settings: RegistrySettings, waiter: Waiter | None = None) -> None:
        self._settings = settings
        self._waiter = waiter or Waiter()
        self._made: SchemaRegistryClient | None = None
        self._ids: dict[tuple[str, str], int] = {}
        self._texts: dict[int, str] = {}
        self._lacks: dict[int, float] = {}

    def close(self) -> None:
        """Close the connections to the registry."""
        if self._made is not None:
            self._made.close()

    @property
    def url(self) -> str:
        """Return where the registry is."""
        return self._settings.url

    @property
    def subject_naming(self) -> SubjectNaming:
        """Return how subjects are named."""
        return self._settings.subject_naming

    def require(self) -> None:
        """Check that the registry answers. Raise Retryable if not, SetupError for credentials.

        A server that knows neither the configuration nor the subjects is not a registry, or its API
        is at another path: SetupError, too.
        """
        operation = "ask the schema registry"
        with self._explained(operation, ""):
            asked = (self._client.get_compatibility, self._client.get_subjects)
            if all(self._is_unknown(ask) for ask in asked):
                raise SetupError(
                    "there is no schema registry at this path (status 404)",
                    operation=operation,
                    subject=self._settings.url,
                    hint="give registry.url the path of its Confluent API, such as "
                    "http://apicurio:8080/apis/ccompat/v7",
                    exit_code=ExitCode.SCHEMA_REFUSED,
                )

    @staticmethod
    def _is_unknown(ask: Callable[[], object]) -> bool:
        """Tell whether the server does not know the request. Raise where it does not answer."""
        try:
            ask()
        except Exception as error:
            status = getattr(error, "http_status_code", 0)
            if status in (0, _UNAUTHORIZED, *_PASSING) or status >= _SERVER_ERROR:
                raise
            own_code = int(getattr(error, "error_code", 0) or 0)
            return status == _NOT_FOUND and own_code < _OWN_CODES
        return False

    def register(self, subject: str, schema: str, kind: str) -> int:
        """Return the id of a schema under `subject`, registered now if it is new there.

        `kind`: AVRO, JSON, PROTOBUF. Wait for the registry. Raise Retryable after the deadline,
        SetupError when the registry refuses the schema.
        """
        known = self._ids.get((subject, schema))
        if known is not None:
            return known
        found = self._waited(lambda: self._register(subject, schema, kind))
        self._ids[subject, schema] = found
        logger.info("schema registered", subject=subject, id=found)
        return found

    def schema(self, schema_id: int) -> tuple[str, str] | None:
        """Return kind (AVRO, JSON, PROTOBUF) and text of a schema; None: the registry lacks it.

        Wait for the registry, and a few seconds for the schema: a registry's follower may not have
        what its leader has registered. Raise Retryable after the deadline, SetupError for
        credentials.
        """
        if time.monotonic() < self._lacks.get(schema_id, 0.0):
            return None
        deadline = time.monotonic() + _FOLLOWS_S
        found = self._waited(lambda: self._schema(schema_id))
        while found is None and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            found = self._waited(lambda: self._schema(schema_id))
        if found is None:
            self._lacks[schema_id] = time.monotonic() + _LACKS_S
        return found

    def _waited(self, ask: Callable[[], _Answer]) -> _Answer:
        """Ask the registry until it answers; raise the last Retryable after the deadline."""
        deadline = time.monotonic() + self._settings.deadline_ms / 1000
        logged = False
        while True:
            self._waiter.turn()
            try:
                return ask()
            except Retryable as error:
                if time.monotonic() > deadline:
                    raise
                if not logged:
                    logged = True
                    logger.warning("waiting for the schema registry", reason=str(error))
                time.sleep(_PAUSE_S)

    def _schema(self, schema_id: int) -> tuple[str, str] | None:
        """Return a schema's text and kind by its id, None if the registry does not have it."""
        from confluent_kafka.schema_registry import SchemaRegistryError

        with self._explained("ask for a schema", ""):
            try:
                return self._get(schema_id)
            except SchemaRegistryError as error:
                if error.error_code == _NO_SCHEMA:
                    return None
                raise

    def _get(self, schema_id: int) -> tuple[str, str]:
        """Return kind and text of a schema. Raise what the client raises, or ValueError."""
        found = self._client.get_schema(schema_id)
        if found.schema_str is None:
            raise ValueError("an answer without a schema")
        return str(found.schema_type or "AVRO"), found.schema_str

    def schema_text(self, schema_id: int) -> str:
        """Return the schema with this id, which never changes.

        Raise Retryable where the registry does not answer, SetupError where it lacks the id.
        """
        if schema_id not in self._texts:
            self._waiter.turn()
            with self._explained("read a schema", f"id {schema_id}"):
                self._texts[schema_id] = self._get(schema_id)[1]
        return self._texts[schema_id]

    def look(self, subject: str, schema: str, kind: str) -> int | None:
        """Return the id of a schema under `subject`, None where it can be registered there.

        Change nothing. Raise as `register`.
        """
        from confluent_kafka.schema_registry import Schema

        made = Schema(schema, kind)
        with self._explained("look a schema up", subject):
            found = self._registered(subject, made)
            if found is None and self._compatible(subject, made) is False:
                said = "as the subject's rule of compatibility says"
                raise self._incompatible(said, "look a schema up", subject)
            return found

    def _register(self, subject: str, schema: str, kind: str) -> int:
        """Return the id of a schema under `subject`, registered now if it is new there.

        A registry answers 409 to an incompatible schema, and to one that another request, perhaps
        our own that was answered too late, registers at the same time (Apicurio: "already exists").
        """
        from confluent_kafka.schema_registry import Schema, SchemaRegistryError

        made = Schema(schema, kind)
        with self._explained("register a schema", subject):
            for _ in range(_CONFLICTS_MAX):
                try:
                    return int(self._client.register_schema(subject, made))
                except SchemaRegistryError as error:
                    if error.http_status_code != _CONFLICT:
                        raise
                    conflict = error
                found = self._registered(subject, made)
                if found is not None:
                    return found
                compatible = self._compatible(subject, made)
                if compatible is False:
                    break
                time.sleep(_PAUSE_S)
            if compatible:
                raise conflict
            raise self._incompatible(_said(conflict), "register a schema", subject)

    def _registered(self, subject: str, made: "Schema") -> int | None:
        """Return the id of a schema under `subject`, None where it is not there."""
        from confluent_kafka.schema_registry import SchemaRegistryError

        try:
            return int(self._client.lookup_schema(subject, made).schema_id or 0)
        except SchemaRegistryError as error:
            if error.http_status_code == _NOT_FOUND:
                return None
            raise

    def _compatible(self, subject: str, made: "Schema") -> bool | None:
        """Tell whether the registry takes a schema beside the versions of `subject`.

        None where it does not tell: Karapace and Redpanda compare with one version alone.
        """
        from confluent_kafka.schema_registry import SchemaRegistryError

        try:
            return bool(self._client.test_compatibility_all_versions(subject, made))
        except SchemaRegistryError as error:
            if error.http_status_code != _NOT_FOUND:
                raise
            if error.error_code == _NO_SUBJECT:  # nothing to be compatible with
                return True
        try:
            return None if self._client.test_compatibility(subject, made) else False
        except SchemaRegistryError as error:
            if error.http_status_code != _NOT_FOUND:
                raise
            return None

    @property
    def _client(self) -> "SchemaRegistryClient":
        if self._made is None:
            from confluent_kafka.schema_registry import SchemaRegistryClient

            self._made = SchemaRegistryClient(self._options())
        return self._made

    def _options(self) -> dict[str, Any]:
        """Return the options of Confluent's client."""
        settings = self._settings
        options: dict[str, Any] = {
            "url": settings.url.rstrip("/"),
            "timeout": _ATTEMPT_S,
            "max.retries": 0,
        }
        if settings.username:
            password = settings.password.get_secret_value()
            options["basic.auth.user.info"] = f"{settings.username}:{password}"
        if settings.ca_file is not None:
            options["ssl.ca.location"] = str(settings.ca_file)
        return options

    @contextmanager
    def _explained(self, operation: str, subject: str) -> Iterator[None]:
        """Raise what to do about an error of the client instead of the error."""
        from confluent_kafka.schema_registry import SchemaRegistryError
        from httpx2 import HTTPError

        try:
            yield
        except SchemaRegistryError as error:
            raise self._refusal(error, operation, subject) from error
        except (HTTPError, OSError) as error:
            raise self._unreachable(f"{type(error).__name__}: {error}", operation) from error
        except _NO_ANSWER as error:
            said = "its answer is not that of a schema registry, but perhaps a proxy's page"
            raise self._unreachable(said, operation) from error

    def _refusal(self, error: Any, operation: str, subject: str) -> SlotbridgeError:
        """Return our error for the registry's answer: no access, refused, or unreachable."""
        status = error.http_status_code
        said = _said(error)
        if status >= _SERVER_ERROR or status in _PASSING:
            return self._unreachable(f"status {status}: {said}", operation)
        if status in (_UNAUTHORIZED, _FORBIDDEN):
            return SetupError(
                f"the schema registry denies access (status {status}): {said}",
                operation=operation,
                subject=f"subject {subject}" if subject else self._settings.url,
                hint="correct registry.username and registry.password, or grant reading and "
                "writing of the subject",
                exit_code=ExitCode.PRIVILEGE_MISSING,
            )
        return SetupError(
            f"the schema registry refuses the schema (status {status}): {said}",
            operation=operation,
            subject=f"subject {subject}",
            hint="the registry's own words say what it does not take in the schema or in the "
            "subject's name: choose another registry.subject_naming, leave the column out "
            "(shaping.columns), or ask the registry's operator about its rules for subjects"
            if status in (_INVALID, _CONFLICT)
            else "check that registry.url names the registry's Confluent API",
            exit_code=ExitCode.SCHEMA_REFUSED,
        )

    def _incompatible(self, answer: str, operation: str, subject: str) -> SetupError:
        return SetupError(
            "the table's new schema is not compatible with earlier ones of the subject "
            f"({self._compared(subject)}): {answer}",
            operation=operation,
            subject=f"subject {subject}",
            hint="let readers take the new schema: set the subject's compatibility to NONE "
            f"(PUT {self._settings.url}/config/{subject}), start the bridge, and set it back; "
            "or leave the changed column out (shaping.columns); the slot keeps the changes",
            exit_code=ExitCode.SCHEMA_REFUSED,
        )

    def _compared(self, subject: str) -> str:
        """Say which versions the registry compares: the latest, or all of them (…_TRANSITIVE)."""
        from confluent_kafka.schema_registry import SchemaRegistryError
        from httpx2 import HTTPError

        try:
            latest = self._client.get_latest_version(subject).version
        except (SchemaRegistryError, HTTPError, OSError, *_NO_ANSWER):
            return "their versions are unknown"
        try:
            rule = str(self._client.get_compatibility(subject))
        except (SchemaRegistryError, HTTPError, OSError, *_NO_ANSWER):
            rule = self._of_all_subjects()
        if not rule:
            return f"the latest is version {latest}"
        if rule.endswith(_TRANSITIVE):
            return f"compatibility {rule}: any of its versions up to {latest} may be the one"
        return f"compatibility {rule}: with version {latest}"

    def _of_all_subjects(self) -> str:
        """Return the registry's own compatibility, "" where it does not tell."""
        from confluent_kafka.schema_registry import SchemaRegistryError
        from httpx2 import HTTPError

        try:
            return str(self._client.get_compatibility())
        except (SchemaRegistryError, HTTPError, OSError, *_NO_ANSWER):
            return ""

    def _unreachable(self, what: str, operation: str) -> Retryable:
        return Retryable(
            f"the schema registry does not answer correctly ({what})",
            operation=operation,
            subject=self._settings.url,
            hint="check that the registry runs, and check registry.url and registry.ca_file",
            exit_code=ExitCode.REGISTRY_UNREACHABLE,
        )


def _said(error: "SchemaRegistryError") -> str:
    """Return the registry's own words."""
    return " ".join(str(error.error_message).split())[:_REASON_CHARACTERS_MAX]
