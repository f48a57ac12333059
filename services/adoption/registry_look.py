"""A schema registry in which nothing is registered yet, asked about the bridge's schemas."""

from typing import Final

from schemas.errors import ExitCode, OperatorNeeded, SetupError
from schemas.registry import SubjectNaming
from services.adoption.last_records import OPERATION
from services.kafka.schema_registry import SchemaRegistry

_UNUSED_ID: Final = 2**31 - 1
"""From here on downwards: ids of schemas that the registry lacks. No record has them."""


class RegistryLook:
    """Registers nothing, and refuses each schema that the registry would refuse."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._registry = registry
        self._new: dict[tuple[str, str], int] = {}
        self._texts: dict[int, str] = {}

    @property
    def subject_naming(self) -> SubjectNaming:
        """Return how subjects are named."""
        return self._registry.subject_naming

    def register(self, subject: str, schema: str, kind: str) -> int:
        """Return the id of a schema, or one that stands for it until it is registered.

        Raise OperatorNeeded where the registry would refuse it.
        """
        known = self._new.get((subject, schema))
        if known is not None:
            return known
        try:
            found = self._registry.look(subject, schema, kind)
        except SetupError as error:
            if error.exit_code is not ExitCode.SCHEMA_REFUSED:
                raise
            raise self._refused(subject, error) from error
        if found is None:
            found = _UNUSED_ID - len(self._new)
            self._texts[found] = schema
        self._new[subject, schema] = found
        return found

    def schema_text(self, schema_id: int) -> str:
        """Return the schema with this id. Raise SlotbridgeError where the registry lacks it."""
        return self._texts.get(schema_id) or self._registry.schema_text(schema_id)

    def _refused(self, subject: str, error: SetupError) -> OperatorNeeded:
        return OperatorNeeded(
            f"the registry would refuse the bridge's schema behind Debezium's: {error.message}",
            operation=OPERATION,
            subject=error.subject,
            hint="in the bridge's schema a column may be null and no column has a default, which "
            "BACKWARD allows, and FORWARD or FULL may not: set the subject's compatibility to "
            f"BACKWARD (PUT {self._registry.url}/config/{subject}), and run this again",
            exit_code=ExitCode.SCHEMA_REFUSED,
        )
