"""The transactions in Kafka beyond the point where the server's history left their timeline."""

import time
from typing import Final

from schemas.events import TransactionEvent
from schemas.lsn import format_lsn
from services.bridge.progress.errors import Beyond, Diverged
from services.bridge.recovery.staged_transactions import Records
from services.kafka.records import READ_DEADLINE_S, parse_record

LISTED_MAX: Final = 20
_CHUNK_RECORDS: Final = 1000


def transactions_beyond(reader: Records, lsn: int, *, until: int | None = None) -> Beyond:
    """Read which transactions of `<prefix>.transaction` commit at `lsn` or later.

    Up to LISTED_MAX are returned by name, the others counted. The topic is in commit order, and
    read backwards. `until`: read only records before this offset; without it, an open transaction
    is waited for. Raise OperatorNeeded for a record that is not a transaction's.
    """
    low, stop = reader.bounds()
    stop = stop if until is None else until
    deadline = time.monotonic() + READ_DEADLINE_S
    listed: list[TransactionEvent] = []
    count = 0
    last = True
    while stop > low:
        start = max(low, stop - _CHUNK_RECORDS)
        chunk = [
            parse_record(TransactionEvent, reader.topic, offset, value)
            for offset, _key, value in reader.between(start, stop, deadline)
            if value is not None
        ]
        stop = start
        if not chunk:
            continue
        whole = [event for event in chunk if event.status == "END" and event.commit_lsn >= lsn]
        if last and chunk[-1].status == "BEGIN" and chunk[-1].commit_lsn >= lsn:
            whole.append(chunk[-1])
        last = False
        listed = (whole + listed)[:LISTED_MAX]
        count += len(whole)
        if chunk[0].commit_lsn < lsn:
            break
    return Beyond(listed, count)


def with_transactions(error: Diverged, beyond: Beyond) -> Diverged:
    """Return `error` with the transactions named as well."""
    return error.naming(_text(beyond), beyond)


def _text(beyond: Beyond) -> str:
    if not beyond.count:
        return "no transaction with events is among them (as far as <prefix>.transaction tells)"
    names = ", ".join(_name(event) for event in beyond.listed)
    rest = beyond.count - len(beyond.listed)
    return f"{beyond.count} transactions: {names}" + (f" and {rest} more" if rest else "")


def _name(event: TransactionEvent) -> str:
    """Describe a transaction: `xid 745 at 0/3000 (public.t 2)`."""
    xid = event.id.partition(":")[0]
    where = f"xid {xid} at {format_lsn(event.commit_lsn)}"
    if event.data_collections is None:
        return f"{where} (in part)"
    counts = ", ".join(f"{c.data_collection} {c.event_count}" for c in event.data_collections)
    return f"{where} ({counts or 'messages'})"
