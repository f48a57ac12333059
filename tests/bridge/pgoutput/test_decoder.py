"""Every message comes back; every damaged one is a DecodeError and nothing else."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.lsn import parse_lsn
from services.bridge.pgoutput.decoder import DecodeError, Decoder
from services.bridge.pgoutput.messages import AnyMessage, Relation, StreamAbort
from tests.promises.bridge.strategies import changes
from tests.promises.bridge.wire import encode


def decoder_with(described: list[Relation]) -> Decoder:
    decoder = Decoder()
    for relation in described:
        decoder.decode(encode(relation), 1)
    return decoder


@given(changes())
def test_decoder_reads_what_the_server_writes(
    case: tuple[list[Relation], AnyMessage],
) -> None:
    described, message = case
    assert decoder_with(described).decode(encode(message), 1) == message


@given(changes(), st.integers(1, 2**32 - 1))
def test_within_a_streamed_block_every_change_carries_its_xid(
    case: tuple[list[Relation], AnyMessage], xid: int
) -> None:
    described, message = case
    decoder = Decoder(streamed=True)
    for relation in described:
        decoder.decode(encode(relation, xid), 1)
    assert decoder.decode(encode(message, xid), 1) == message


def test_an_abort_may_name_its_position() -> None:
    with_position = b"A" + struct.pack("!IIQq", 7, 8, 100, 0)
    assert Decoder().decode(with_position, 1) == StreamAbort(7, 8)


@given(changes())
def test_every_truncation_is_a_decode_error(case: tuple[list[Relation], AnyMessage]) -> None:
    described, message = case
    data = encode(message)
    for length in range(len(data)):
        with pytest.raises(DecodeError):
            decoder_with(described).decode(data[:length], 1)


@given(changes(), st.data())
def test_a_flipped_byte_is_a_decode_error_or_a_message(
    case: tuple[list[Relation], AnyMessage], data: st.DataObject
) -> None:
    described, message = case
    damaged = bytearray(encode(message))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decoder_with(described).decode(bytes(damaged), 1)
    except DecodeError as error:
        assert error.lsn == 1


def test_an_error_names_position_and_remedy() -> None:
    lsn = parse_lsn("0/16B3748")
    with pytest.raises(DecodeError, match=r"unknown message kind.*0/16B3748.*Hint"):
        Decoder().decode(b"?", lsn)
