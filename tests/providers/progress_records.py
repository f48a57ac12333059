"""Progress records for tests: one of a fresh prefix, with other values where a test gives them."""

from typing import Any, Final

from pydantic import BaseModel

from schemas.progress import (
    ProgressKafka,
    ProgressPosition,
    ProgressRecord,
    ProgressServer,
    ProgressSettings,
    ProgressWitness,
)

PLAIN: Final = ProgressRecord(
    slot="s",
    ts_ms=0,
    position=ProgressPosition(commit_lsn=0, end_lsn=0, seq=0),
    server=ProgressServer(system_identifier="1", timeline=1, history={}),
    witness=ProgressWitness(kind="origin"),
    kafka=ProgressKafka(),
    settings=ProgressSettings(publication="p", publication_oid=1, source_origin="any"),
)
_PARTS: Final[dict[str, type[BaseModel]]] = {
    "position": ProgressPosition,
    "server": ProgressServer,
    "witness": ProgressWitness,
    "kafka": ProgressKafka,
    "settings": ProgressSettings,
}


def progress_record(**values: Any) -> ProgressRecord:
    """Make a record. Each value is given by its field's name alone: no two parts share one."""
    return altered(PLAIN, **values)


def altered(record: ProgressRecord, **values: Any) -> ProgressRecord:
    """Return the record with other values; a test reads it, so they are validated."""
    document = record.model_dump()
    for name, value in values.items():
        parts = [part for part, model in _PARTS.items() if name in model.model_fields]
        (document[parts[0]] if parts else document)[name] = value
    return ProgressRecord.model_validate(document)
