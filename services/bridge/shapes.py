"""A relation's shape as a schema event, when it is not what was last published. Pure."""

from typing import Final, Literal

from schemas.events import Column, SchemaEvent, SchemaKey, schema_topic
from services.bridge.envelope import Event
from services.bridge.messages import Relation, Type
from services.bridge.pg_types import TYPE_NAMES

Identity = Literal["default", "nothing", "full", "index"]
_IDENTITIES: Final[dict[str, Identity]] = {
    "d": "default",
    "n": "nothing",
    "f": "full",
    "i": "index",
}


class Shapes:
    """Remembers each table's last published shape; `known` is what the topic had at start."""

    def __init__(self, prefix: str, known: dict[tuple[str, str], SchemaEvent]) -> None:
        self._topic = schema_topic(prefix)
        self._known = dict(known)

    def change(
        self, relation: Relation, types: dict[int, Type], commit_lsn: int, now_us: int
    ) -> Event | None:
        """The schema event that `relation` calls for at `commit_lsn`, None when nothing changed."""
        columns = [
            Column(
                name=column.name,
                type=_type_name(column.type_oid, types),
                type_oid=column.type_oid,
                typmod=column.typmod,
                key=column.key,
            )
            for column in relation.columns
        ]
        identity = _IDENTITIES[relation.replica_identity]
        key = (relation.schema, relation.table)
        before = self._known.get(key)
        if before and before.after == columns and before.replica_identity == identity:
            return None
        event = SchemaEvent(
            schema=relation.schema,
            table=relation.table,
            commit_lsn=commit_lsn,
            ts_ms=now_us // 1000,
            replica_identity=identity,
            before=before.after if before else None,
            after=columns,
        )
        self._known[key] = event
        name = SchemaKey(schema=relation.schema, table=relation.table)
        return Event(
            self._topic,
            name.model_dump_json(by_alias=True).encode(),
            event.model_dump_json(by_alias=True).encode(),
        )


def _type_name(oid: int, types: dict[int, Type]) -> str:
    if oid in TYPE_NAMES:
        return TYPE_NAMES[oid]
    described = types.get(oid)
    return f"{described.schema}.{described.name}" if described else f"oid:{oid}"
