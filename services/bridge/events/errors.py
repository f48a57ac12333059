"""Errors of changes that can't become events, with their remedies. Pure."""

from collections.abc import Sequence
from typing import Final

from schemas.errors import BadInput, ExitCode, Retryable
from services.bridge.events.leaf_identities import LeafIdentity
from services.bridge.pgoutput.errors import DecodeError

FOR_LATER_CHANGES: Final = (
    "for later changes; to go on after those that were made before, also where the table or "
    "partition is detached or dropped since, leave the table out (shaping.exclude), and once it "
    "is back make its topic right: `slotbridge recover --force`"
)
"""Behind a hint that changes the table: the WAL keeps older changes as they were written."""


class UnfitValue(ValueError):
    """A value that no schema of its column's type has; the text says why, without the value."""


class RowRefused(ValueError):
    """A row that can't be published: `bridge.on_refused` says whether it is a dead letter."""


class ExpressionFailed(RowRefused):
    """A row for which an expression of the settings has no value."""

    def __init__(self, key: str, expression: str, reason: str) -> None:
        super().__init__(f"the expression {expression!r} of {key} has no value: {reason}")
        self.key = key


class EntersWithoutValue(RowRefused):
    """A row that an update brings into a filter, without an unchanged value of a column."""

    def __init__(self, column: str) -> None:
        super().__init__(
            "an update brings a row into the filter, and neither the WAL nor the old row has the "
            f"unchanged TOAST value of column {column}: the row would be new without that value"
        )
        self.column = column


class HiddenByPartition(RowRefused):
    """A change that may be of partitions whose replica identity hides old values, `what`."""

    def __init__(self, what: str, leaves: Sequence[LeafIdentity]) -> None:
        super().__init__(_hidden(what, leaves))
        self.leaves = leaves


class OldRowHidden(BadInput):
    """A change that may be of partitions, `leaves`, that hide the old row's key or place."""

    leaves: Sequence[LeafIdentity] = ()


class DescriptionOutdated(Retryable):
    """The session ends: the server describes a partition anew in the next one alone."""

    def __init__(self, leaf: LeafIdentity, table: str) -> None:
        super().__init__(
            f"partition {leaf} by an earlier transaction, and maybe another since: whether a "
            "change is hidden is judged anew",
            operation="encode an event",
            subject=table,
            hint="the bridge continues with a new session",
        )
        self.leaf = leaf


def not_encoded(error: ValueError, table: str, lsn: int) -> BadInput:
    """Return the error of a change with a value that could not be encoded."""
    if isinstance(error, UnfitValue):
        return BadInput(
            f"a value does not fit its column's schema: {error}",
            operation="encode an event",
            subject=table,
            lsn=lsn,
            hint="publish the column as text (bridge.decimal_handling, bridge.time_precision, or a "
            "mask with truncate in shaping.masks), leave it out (shaping.columns), or set "
            "kafka.key_format and kafka.value_format to json, or to avro where a number is NaN or "
            "infinite",
        )
    if isinstance(error, ExpressionFailed):
        return BadInput(
            str(error),
            operation="encode an event",
            subject=table,
            lsn=lsn,
            hint=f"correct {error.key}, so that it has a value for this row, and start the bridge "
            "again; or set bridge.on_refused: dead_letter, which goes on without the row",
            exit_code=ExitCode.RECORD_REFUSED,
        )
    if isinstance(error, HiddenByPartition):
        return BadInput(
            str(error),
            operation="encode an event",
            subject=table,
            lsn=lsn,
            hint=f"{_altered(error.leaves)}, or set bridge.on_refused: dead_letter",
            exit_code=ExitCode.RECORD_REFUSED,
        )
    if isinstance(error, EntersWithoutValue):
        return BadInput(
            str(error),
            operation="encode an event",
            subject=table,
            lsn=lsn,
            hint=f"ALTER TABLE {table} REPLICA IDENTITY FULL, for later updates; to go on after "
            f"this one, leave column {error.column} out (shaping.columns, shaping.computed) or the "
            "filter (shaping.filters), or set bridge.on_refused: dead_letter",
            exit_code=ExitCode.RECORD_REFUSED,
        )
    return DecodeError(
        f"a value does not have the text form of its type ({type(error).__name__})",
        operation="encode an event",
        subject=table,
        lsn=lsn,
        hint="report this with the table's definition; the slot keeps the change",
    )


def updated_outbox(table: str, lsn: int) -> BadInput:
    """Return the error of an update of an outbox row."""
    return BadInput(
        "a row of the outbox was updated after its message was published",
        operation="encode an event",
        subject=table,
        lsn=lsn,
        hint=f"insert another row instead; to skip updates: shaping.skip: {{{table}: [u]}}",
        exit_code=ExitCode.RECORD_REFUSED,
    )


def without_key(table: str, lsn: int, leaves: Sequence[LeafIdentity] = ()) -> BadInput:
    """Return the error of a change without the old row's key; `leaves`: partitions that hide it."""
    if leaves:
        return _hidden_by(leaves, "key", table, lsn)
    return BadInput(
        "an update or delete does not have the old row's key",
        operation="encode an event",
        subject=table,
        lsn=lsn,
        hint="give each partition the replica identity of the root table that it is published as, "
        "or REPLICA IDENTITY FULL; to skip the table: shaping.exclude",
    )


def without_place(table: str, lsn: int, leaves: Sequence[LeafIdentity] = ()) -> BadInput:
    """Return the error of a change that does not tell the columns that choose the partition.

    `leaves`: the table's partitions whose replica identity hides them.
    """
    if leaves:
        what = "columns that choose the partition (shaping.partition_by)"
        return _hidden_by(leaves, what, table, lsn)
    return BadInput(
        "an update or delete does not tell the values of the columns that choose the partition "
        "(shaping.partition_by)",
        operation="encode an event",
        subject=table,
        lsn=lsn,
        hint="give the table, and each partition of it, REPLICA IDENTITY FULL; or leave the table "
        "out of shaping.partition_by",
    )


def delete_without_key(table: str, lsn: int) -> BadInput:
    """Return the error of a delete that should become a tombstone, in a table without a key."""
    return BadInput(
        "a deleted row has no key, so no tombstone can say that it is gone",
        operation="encode an event",
        subject=table,
        lsn=lsn,
        hint="set shaping.flat.deletes: rewrite, choose a key in shaping.keys, or skip the "
        f"table's deletes: shaping.skip: {{{table}: [d]}}",
        exit_code=ExitCode.RECORD_REFUSED,
    )


_NAMED_MAX: Final = 3
"""How many partitions an error names."""


def _hidden_by(leaves: Sequence[LeafIdentity], what: str, table: str, lsn: int) -> BadInput:
    """Return the error of an old value that these partitions' replica identities hide."""
    error = OldRowHidden(
        _hidden(what, leaves),
        operation="encode an event",
        subject=table,
        lsn=lsn,
        hint=_altered(leaves),
    )
    error.leaves = leaves
    return error


def _hidden(what: str, leaves: Sequence[LeafIdentity]) -> str:
    named = ", ".join(map(str, leaves[:_NAMED_MAX]))
    more = f" and {len(leaves) - _NAMED_MAX} more" if len(leaves) > _NAMED_MAX else ""
    return f"an update or delete does not tell the old row's {what}: partition {named}{more}"


def _altered(leaves: Sequence[LeafIdentity]) -> str:
    names = dict.fromkeys(leaf.partition for leaf in leaves[:_NAMED_MAX])
    altered = "; ".join(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in names)
    return f"{altered}, or the identity of the root, {FOR_LATER_CHANGES}"
