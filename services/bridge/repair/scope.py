"""Which published tables can be compared with their topics, and why others can't. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from schemas.errors import ExitCode, SettingsError, SetupError
from schemas.naming import table_matches
from services.bridge.events.shaping.tables import Shaping
from services.bridge.repair.diagnosis import OPERATION
from services.bridge.snapshot.tables import TableShape

_OUTBOX: Final = "is an outbox: its messages are not rows"


class Scope(NamedTuple):
    """The tables to compare, in order; and those that are not, each with the reason."""

    compared: Sequence[TableShape]
    left_out: Mapping[str, str]


def require_all_published(publication: str, unpublished: Sequence[str] | None) -> None:
    """Raise SetupError where topics are not meant to be equal to tables, or no table is chosen.

    `unpublished`: kinds of changes that the publication leaves out; None: there is none.
    """
    if unpublished is None:
        raise SetupError(
            "the publication does not exist, but it determines which tables are compared",
            operation=OPERATION,
            subject=f"publication {publication}",
            hint="create the publication for the tables that have topics, then run `slotbridge "
            "recover` again",
            exit_code=ExitCode.SERVER_SETTING,
        )
    if unpublished:
        raise SetupError(
            f"the publication leaves out {', '.join(unpublished)}: topics differ from their tables "
            "on purpose",
            operation=OPERATION,
            subject=f"publication {publication}",
            hint="to make them equal: ALTER PUBLICATION … SET (publish = 'insert, update, delete, "
            "truncate'), run `slotbridge recover` again, and set `publish` back; else start over "
            "with a new slot and topic prefix",
            exit_code=ExitCode.SERVER_SETTING,
        )


def scope_of(shapes: Iterable[TableShape], shaping: Shaping, without: Sequence[str]) -> Scope:
    """Choose the tables; `without`: patterns (`schema.table`) of those that an operator leaves out.

    Outboxes are left out by themselves.

    Raise SettingsError for tables that can't be compared and that nobody has left out, and for a
    pattern that fits no published table.
    """
    compared, left_out, impossible = [], {}, {}
    unused = {*without}
    for shape in sorted(shapes, key=lambda shape: shape.name):
        schema, table = shape.relation.schema, shape.relation.table
        if not shaping.naming.included(schema, table):
            continue
        named = [pattern for pattern in without if table_matches(pattern, schema, table)]
        unused -= {*named}
        why = _not_comparable(shape, shaping)
        if named or why == _OUTBOX:
            left_out[shape.name] = why or "left out by --without"
        elif why:
            impossible[shape.name] = why
        else:
            compared.append(shape)
    if unused:
        raise SettingsError(
            f"--without {min(unused)} matches no published table", operation=OPERATION
        )
    if impossible:
        listed = "; ".join(f"{name} {why}" for name, why in impossible.items())
        raise SettingsError(
            f"tables can't be compared with their topics: {listed}",
            operation=OPERATION,
            hint="leave them out by --without TABLE: their topics then stay incomplete",
        )
    return Scope(compared, left_out)


def _not_comparable(shape: TableShape, shaping: Shaping) -> str:
    """Return why a table's topic can't be compared with its rows, "" where it can."""
    schema, table = shape.relation.schema, shape.relation.table
    plan = shaping.plan(shape.relation)
    if plan.outbox is not None:
        return _OUTBOX
    if plan.skipped:
        return f"has operations that are not published ({', '.join(sorted(plan.skipped))})"
    if plan.places:
        return "has partitions that its key does not choose (shaping.partition_by)"
    if not shape.key and not shaping.naming.key(schema, table):
        return "has no primary key"
    return ""
