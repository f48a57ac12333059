"""What the relay counts does not depend on how the bytes arrive."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.wire import Traffic, count_whole

change = st.binary(max_size=40).map(lambda payload: b"w" + bytes(24) + payload)
keepalive = st.just(b"k" + bytes(17))
contents = st.lists(st.tuples(st.sampled_from([b"d", b"T", b"Z"]), change | keepalive), max_size=8)


@given(contents, st.lists(st.integers(1, 30), max_size=20))
def test_counted_by_kind_whatever_the_pieces(
    messages: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(
        kind + struct.pack("!I", 4 + len(content)) + content for kind, content in messages
    )
    counts = [0] * len(Traffic._fields)
    unread = bytearray()
    for size in [*cuts, len(stream)]:
        piece, stream = stream[:size], stream[size:]
        unread += piece
        count_whole(unread, counts)
    data = [content for kind, content in messages if kind == b"d"]
    changes = [content for content in data if content[:1] == b"w"]
    assert not unread
    assert Traffic(*counts) == Traffic(
        len(changes),
        sum(5 + len(content) for content in changes),
        sum(len(content) - 25 for content in changes),
        len(data) - len(changes),
        (len(data) - len(changes)) * (5 + 18),
    )
