"""Which transactions are beyond a switch point, read backwards over the borders of chunks."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import OperatorNeeded
from schemas.events import DataCollection, TransactionEvent
from services.bridge.progress.errors import Diverged
from services.bridge.recovery import divergence
from services.bridge.recovery.divergence import LISTED_MAX, transactions_beyond, with_transactions
from services.kafka.records import Record


class Stored:
    """The committed records of a topic."""

    topic = "p.transaction"

    def __init__(self, values: Sequence[bytes]) -> None:
        self.values = values

    def bounds(self) -> tuple[int, int]:
        return 0, len(self.values)

    def between(self, start: int, stop: int, deadline: float) -> Iterator[Record]:
        for offset in range(start, stop):
            yield offset, None, self.values[offset]


def boundary(lsn: int, status: str) -> bytes:
    counts = [DataCollection(data_collection="public.t", event_count=lsn)]
    return (
        TransactionEvent.model_validate(
            {
                "status": status,
                "id": f"{lsn + 700}:{lsn}",
                "ts_ms": 0,
                "commit_lsn": lsn,
                "event_count": lsn if status == "END" else None,
                "data_collections": counts if status == "END" else None,
            }
        )
        .model_dump_json()
        .encode()
    )


def topic(count: int, *, in_part: bool) -> Stored:
    """Transactions that commit at 10, 20, …; the last one may lack its end."""
    values = [boundary(10 * n, s) for n in range(1, count + 1) for s in ("BEGIN", "END")]
    return Stored(values[:-1] if in_part and values else values)


@given(st.integers(0, 60), st.integers(0, 700), st.booleans(), st.integers(1, 7))
def test_the_first_are_listed_and_all_are_counted(
    count: int, lsn: int, in_part: bool, chunk: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergence, "_CHUNK_RECORDS", chunk)
        found = transactions_beyond(topic(count, in_part=in_part), lsn)
    expected = [10 * n for n in range(1, count + 1) if 10 * n >= lsn]
    assert found.count == len(expected)
    assert [event.commit_lsn for event in found.listed] == expected[:LISTED_MAX]


def test_the_error_names_the_lost_transactions() -> None:
    diverged = Diverged("s", "7", 1, 2, 25, 41)
    error = with_transactions(diverged, transactions_beyond(topic(4, in_part=True), 25))
    assert (
        "2 transactions: xid 730 at 0/1E (public.t 30), xid 740 at 0/28 (in part)" in error.message
    )
    none = with_transactions(diverged, transactions_beyond(topic(2, in_part=False), 25))
    assert "no transaction with events" in none.message
    assert none.exit_code == error.exit_code == 32


def test_a_record_that_is_not_of_its_kind_is_refused() -> None:
    with pytest.raises(OperatorNeeded, match="not a TransactionEvent"):
        transactions_beyond(Stored([b"{}"]), 0)
