"""Filters and computed columns of one relation: a change -> the change that is published. Pure.

    insert, delete, row of a snapshot   as it is, where its row fits; else nothing
    update, old and new row fit         the update
    only the new row fits               an insert of it
    only the old row fits               a delete of it
    truncate                            as it is

As PostgreSQL's row filters do. Rows get the values of the computed columns behind their own. A
filter uses columns of the replica identity alone, unless no update or delete is published: of
others, the old value is not told, and nothing is guessed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from schemas.errors import SettingsError
from services.bridge.events.shaping.expressions import Expression, Result
from services.bridge.pgoutput.messages import (
    UNCHANGED,
    Delete,
    Insert,
    Relation,
    RelationColumn,
    Row,
    Update,
    Value,
)

RowChange = Insert | Update | Delete
_PLACEHOLDERS = (25, 17)
"""Types of computed columns whose values may be the placeholder of an unchanged value."""
_NOT_IN_WAL = (
    "the WAL does not have an unchanged TOAST value that it uses: set REPLICA IDENTITY FULL on the "
    "table"
)


class RowRules:
    """The rules of `relation`. `identity`: columns whose old values are told; none: not judged.

    `filters`, `computed`: (key in the settings, expression), of computed columns by name. Raise
    SettingsError for an expression that does not fit the relation.
    """

    def __init__(
        self,
        relation: Relation,
        filters: Sequence[tuple[str, str]],
        computed: Mapping[str, tuple[str, str]],
        identity: Collection[str] | None,
    ) -> None:
        self._filters = [Expression(text, key, relation) for key, text in filters]
        for expression in self._filters:
            if expression.type != "BOOL":
                raise expression.wrong(f"its type is {expression.type.lower()}, not bool")
            names = {relation.columns[index].name for index in expression.uses}
            if identity and (hidden := names - set(identity)):
                raise _hidden_column(expression, relation, min(hidden))
        self._computed: list[tuple[Expression, Result]] = []
        for key, text in computed.values():
            expression = Expression(text, key, relation)
            self._computed.append((expression, expression.result()))
        self.filter_columns = frozenset(index for one in self._filters for index in one.uses)
        """The columns that filters use, as indexes of the relation's."""
        self.columns = tuple(
            RelationColumn(name, result.type_oid, -1, False)
            for name, (_, result) in zip(computed, self._computed, strict=True)
        )
        """The computed columns, as those of a relation."""

    def apply(self, change: RowChange) -> RowChange | None:
        """Return the change that is published, None for nothing.

        Raise ExpressionFailed for a row that an expression fails on.
        """
        if isinstance(change, Insert):
            row = self.chosen(change.new)
            return None if row is None else change._replace(new=row)
        if isinstance(change, Delete):
            if not self._fits_old(change):
                return None
            return change._replace(old=self._old(change.old, change.old_kind))
        return self._update(change)

    def chosen(self, row: Row) -> Row | None:
        """Return a whole row with its computed columns, None where it does not fit."""
        return [*row, *self._values(row)] if self._fits(row) else None

    def _update(self, change: Update) -> RowChange | None:
        """Return an update by what the filter lets through: it may become an insert or a delete.

        None if neither the old nor the new row passes. Computed values are appended to the new row.
        """
        old, new = change.old, change.present_values
        fits, fitted = self._fits(new), self._fits_old(change)
        if old is None:  # then no column of the identity, which filters use alone, has changed
            return change._replace(new=[*new, *self._values(new)]) if fits else None
        if fitted:
            old_row = self._old(old, change.old_kind)
            if not fits:
                return Delete(change.relation, change.old_kind or "O", old_row)
            return change._replace(old=old_row, new=[*new, *self._values(new)])
        return Insert(change.relation, [*new, *self._values(new)]) if fits else None

    def _fits_old(self, change: Update | Delete) -> bool:
        """Tell whether the old row, if any, fits. Raise ExpressionFailed if that is hidden."""
        old = change.old
        for expression in self._filters if change.old_kind != "O" else ():
            if change.relation.replica_identity == "f" or (
                old is not None and any(old[index] is None for index in expression.uses)
            ):
                raise expression.failed(
                    "the old row is not told whole: give each partition the replica identity of "
                    "the root table that it is published as, or REPLICA IDENTITY FULL"
                )
        return old is None or self._fits(old)

    def _fits(self, row: Row) -> bool:
        """Tell whether all filters are true for a row. Raise where a value is not in the WAL."""
        for expression in self._filters:
            if any(row[index] is UNCHANGED for index in expression.uses):
                raise expression.failed(_NOT_IN_WAL)
            if expression.value(row) is not True:
                return False
        return True

    def _old(self, row: Row, kind: str | None) -> Row:
        """Return an old row with its computed columns, which only a whole one has."""
        return [*row, *(self._values(row) if kind == "O" else [None] * len(self._computed))]

    def _values(self, row: Row) -> list[Value]:
        return [_value(expression, result, row) for expression, result in self._computed]


def _value(expression: Expression, result: Result, row: Row) -> Value:
    """Return a computed column's value; UNCHANGED if it is made of unchanged values alone.

    Raise ExpressionFailed where a value that it needs is not in the WAL, or does not fit its type.
    """
    lacking = [row[index] is UNCHANGED for index in expression.uses]
    if any(lacking):
        if all(lacking) and result.type_oid in _PLACEHOLDERS:
            return UNCHANGED
        raise expression.failed(_NOT_IN_WAL)
    found = expression.value(row)
    if found is None:
        return None
    write: Callable[[object], bytes] = result.write
    try:
        return write(found)
    except ValueError as error:
        raise expression.failed(str(error)) from None


def _hidden_column(expression: Expression, relation: Relation, column: str) -> SettingsError:
    """Return the error of an expression that needs an old value outside of the identity."""
    error = expression.wrong(
        f"it uses {column}, whose old value updates and deletes do not tell with the table's "
        "replica identity"
    )
    error.hint = (
        f"ALTER TABLE {relation.schema}.{relation.table} REPLICA IDENTITY FULL, or skip the "
        "table's updates and deletes (shaping.skip), or use columns of its key alone"
    )
    return error
