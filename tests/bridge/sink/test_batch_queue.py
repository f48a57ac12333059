"""What waits for Kafka: all of it comes in order, and what is empty takes no room."""

from hypothesis import given
from hypothesis import strategies as st

from services.bridge.events.event import Event
from services.bridge.progress.ledger import Position
from services.bridge.sink.batch_queue import PORTION_OVERHEAD_BYTES, Waiting
from services.bridge.transactions.assembler import EventBatch

EVENT = Event("t", b"k", b"v", None)


def batch(
    lsn: int, events: int = 0, staging: int = 0, seq: int = 0, counted: int = 0
) -> EventBatch:
    position = Position(lsn, lsn + 8, seq)
    counts = {"public.t": counted} if counted else None
    content = 100 * (events + staging)
    return EventBatch(
        [EVENT] * events, position, content, 1, counts=counts, staging=[EVENT] * staging
    )


def test_transactions_of_a_table_that_is_not_published_wait_in_the_room_of_one() -> None:
    waiting = Waiting()
    waiting.add(batch(8, events=1))
    for number in range(300_000):
        waiting.add(batch(16 + 8 * number))
    assert len(waiting) == 2
    assert waiting.bytes == 100 + 2 * PORTION_OVERHEAD_BYTES


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 1), st.integers(0, 3)),
        max_size=30,
    ),
    st.integers(0, 3),
)
def test_nothing_is_left_out_but_earlier_positions(
    contents: list[tuple[int, int, int, int]], taken_between: int
) -> None:
    waiting, given_ones, replaced, taken = Waiting(), [], [], []
    for number, content in enumerate(contents):
        given_ones.append(batch(8 * number + 8, *content))
        left = waiting.add(given_ones[-1])
        replaced += [left] if left is not None else []
        if taken_between and not number % taken_between and len(waiting):
            taken.append(waiting.next())
    while len(waiting):
        taken.append(waiting.next())
    assert waiting.bytes == 0
    lsns = [one.position for one in taken]
    assert lsns == sorted(lsns)
    assert sorted([*lsns, *(one.position for one in replaced)]) == [p.position for p in given_ones]
    assert not any(one.events or one.staging or one.position.seq for one in replaced)
    if given_ones:
        assert taken[-1].position == given_ones[-1].position
    counted = [one.counts for one in given_ones if one.counts is not None]
    assert [one.counts for one in taken if one.counts is not None][-1:] == counted[-1:]
