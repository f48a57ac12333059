"""A relation's shape as a schema event, when it is not what was last published. Pure."""

from collections.abc import Callable, Collection, Sequence
from typing import Final, Literal

from schemas.events import schema_topic
from schemas.schema_events import Column, SchemaEvent, SchemaKey
from services.bridge.events.event import Event, Stamp
from services.bridge.events.missing_values import NOTHING, MissingValues, hidden_name
from services.bridge.pgoutput.messages import Relation, RelationColumn
from services.bridge.pgoutput.pg_types import TYPE_NAMES

Identity = Literal["default", "nothing", "full", "index"]
MissingOf = Callable[[SchemaEvent | None, Sequence[Column]], MissingValues]
"""(last schema event of this table, its columns now) -> what rows that were there have."""
_IDENTITIES: Final[dict[str, Identity]] = {
    "d": "default",
    "n": "nothing",
    "f": "full",
    "i": "index",
}


class Shapes:
    """Remembers each table's last published shape; `known` is what the topic had at start."""

    def __init__(self, prefix: str, published_shapes: dict[tuple[str, str], SchemaEvent]) -> None:
        self._topic = schema_topic(prefix)
        self._known = dict(published_shapes)

    def last_key(self, relation: Relation) -> frozenset[str]:
        """Return the key columns of the table's last schema event.

        Return none if that event is of another table of this name (another oid).
        """
        last = self._known.get((relation.schema, relation.table))
        if last is None or last.oid != relation.oid:
            return frozenset()
        return frozenset(column.name for column in last.after if column.key)

    def former_oid(self, relation: Relation) -> int:
        """Return the oid of the table that had this name at its last schema event, 0 for none."""
        last = self._known.get((relation.schema, relation.table))
        return 0 if last is None else last.oid

    def change(
        self,
        relation: Relation,
        stamp: Stamp,
        seq: int,
        missing_of: MissingOf = lambda *_: NOTHING,
        *,
        left_out: Collection[str] = (),
        differs: Callable[[SchemaEvent], bool] = lambda _: False,
    ) -> Event | None:
        """Return the schema event that `relation` calls for at `seq`, None when nothing changed.

        `missing_of` returns the values of the rows that were there. `left_out`: columns that the
        server sends and settings leave out. `differs` is asked where nothing has changed, so far as
        names and types tell: a column may have been dropped and added again.
        """
        columns = [
            Column(
                name=column.name,
                type=_type_name(column),
                type_oid=column.type_oid,
                typmod=column.typmod,
                key=column.key,
            )
            for column in relation.columns
        ]
        identity = _IDENTITIES[relation.replica_identity]
        hidden = sorted(hidden_name(relation.oid, name) for name in left_out)
        key = (relation.schema, relation.table)
        before = self._known.get(key)
        if before is not None:
            former = (before.oid, before.after, before.replica_identity, before.left_out)
            if former == (relation.oid, columns, identity, hidden) and not differs(before):
                return None
        same_table = before is not None and before.oid == relation.oid
        found = missing_of(before if same_table else None, columns)
        event = SchemaEvent(
            schema=relation.schema,
            table=relation.table,
            oid=relation.oid,
            commit_lsn=stamp.commit_lsn,
            seq=seq,
            ts_ms=stamp.encoded_us // 1000,
            replica_identity=identity,
            before=before.after if before else None,
            after=columns,
            missing=found.missing,
            unsent=found.unsent,
            attnums_before=before.attnums if before is not None and same_table else [],
            attnums=found.attnums,
            attnum_max=found.attnum_max,
            relfilenode=found.relfilenode,
            publication=found.publication,
            left_out=hidden,
        )
        self._known[key] = event
        name = SchemaKey(schema=relation.schema, table=relation.table)
        return Event(
            self._topic,
            name.model_dump_json(by_alias=True).encode(),
            event.model_dump_json(by_alias=True, exclude_defaults=True).encode(),
            table=f"{relation.schema}.{relation.table}",
            seq=seq,
        )


def _type_name(column: RelationColumn) -> str:
    return column.type_name or TYPE_NAMES.get(column.type_oid) or f"oid:{column.type_oid}"
