"""The C extension that encodes most rows, if setup.py could build it; else Python does the same.

    text           a growing text
    forms          values' usual text forms as JSON
    scan           JSON text read token by token
    codecs         JSON text to a binary form: structs, and whether a record is taken
    avro, protobuf the two binary forms                    as services.bridge.events.formats
    rows           a row's bytes to its event              as Decoder and Envelope
    transactions   rows, and whole small transactions      as Assembler and Envelope
    messages       many from libpq                         as a list
    records        many to librdkafka                      as sink.batch_produce.plain
    tally          rows counted by table and operation     as sink.row_tally
    foreign        where functions of libpq and librdkafka are

`engine` has what is called from without, or is None: not built, or switched off by
SLOTBRIDGE_COMPILED=0. The same tests run on both ways
(tests/promises/bridge/test_compiled.py); what it brings is in benchmarks/results/lab-notes.md.
"""

import os
from typing import Any, NamedTuple, Protocol

from services.bridge.compiled.sources import digest

SWITCH = "SLOTBRIDGE_COMPILED"


class Messages(Protocol):
    """pgoutput messages with their WAL positions: a list, or messages.Messages."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[int, bytes]: ...
    def append(self, message: tuple[int, bytes], /) -> None: ...
    def clear(self) -> None: ...


class Engine(NamedTuple):
    """The compiled modules that others call."""

    forms: Any
    avro: Any
    protobuf: Any
    rows: Any
    transactions: Any
    messages: Any
    records: Any
    tally: Any


def _modules() -> Engine | None:
    """Return the compiled modules; None if switched off, not built, or of another version."""
    if os.environ.get(SWITCH, "1") == "0":
        return None
    try:
        from services.bridge.compiled import (
            avro,
            codecs,
            forms,
            messages,
            protobuf,
            records,
            rows,
            scan,
            tally,
            text,
        )
        from services.bridge.compiled import transactions as whole
    except (ImportError, TypeError, ValueError):  # not there, or of different times
        return None
    found = Engine(forms, avro, protobuf, rows, whole, messages, records, tally)
    return found if _current(*found, codecs, scan, text) else None


def _current(*modules: Any) -> bool:
    """Tell whether the modules were built from these sources; true if the sources are missing."""
    return {module.DIGEST for module in modules} == {digest() or modules[0].DIGEST}


engine: Engine | None = _modules()


def new_messages() -> Messages:
    """Return an empty list of messages, in the form that the engine takes."""
    return [] if engine is None else engine.messages.Messages()
