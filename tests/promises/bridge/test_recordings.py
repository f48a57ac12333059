"""Messages that a real server has sent: understood, and damaged in every place, refused."""

import functools
import tracemalloc
from collections.abc import Iterator
from typing import get_args

import pytest

from services.bridge.pgoutput.decoder import DecodeError, Decoder
from services.bridge.pgoutput.messages import (
    UNCHANGED,
    AnyMessage,
    BeginPrepare,
    Delete,
    Insert,
    Message,
    Origin,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamPrepare,
    Truncate,
    Type,
    Update,
)
from tests.promises.bridge.recordings.record import NAMES, Recording, load, record
from tests.promises.bridge.recordings.scenario import ORIGIN
from tests.promises.bridge.recordings.walk import Replica, Step, transcript, walk
from tests.providers.interface import Provider

KINDS = frozenset(get_args(AnyMessage))
DAMAGE_BYTES_MAX = 2 * 2**20


@functools.cache
def recording() -> Recording:
    return load()


def steps(name: str) -> list[Step]:
    return list(walk(recording().messages[name]))


def distinct() -> Iterator[Step]:
    """Each different message once, as each kind of decoder meets it."""
    seen = set()
    for name in NAMES:
        for step in walk(recording().messages[name]):
            if (step.streamed, step.recorded.data) not in seen:
                seen.add((step.streamed, step.recorded.data))
                yield step


def decoder_of(step: Step) -> Decoder:
    """A decoder that knows what that of `step` knew."""
    decoder = Decoder(streamed=step.streamed)
    decoder.relations.update(step.decoder.relations)
    decoder.types.update(step.decoder.types)
    return decoder


def relation_of(step: Step) -> Relation | None:
    match step.message:
        case Insert(relation) | Update(relation) | Delete(relation):
            return relation
    return None


def test_every_kind_of_message_is_recorded() -> None:
    kinds = {step.recorded.data[:1] for name in NAMES for step in steps(name)}
    types = {type(step.message) for name in NAMES for step in steps(name)}
    assert len(kinds) == len(KINDS) == 19
    assert types == KINDS


@pytest.mark.parametrize("name", NAMES)
def test_recorded_messages_rebuild_the_tables_of_the_server(name: str) -> None:
    replica = Replica()
    for step in steps(name):
        replica.take(step)
    assert replica.contents() == recording().contents


def test_every_shape_of_a_change_is_recorded() -> None:
    messages = [step.message for step in steps("plain")]
    updates = {(m.relation.table, m.old_kind) for m in messages if isinstance(m, Update)}
    assert {("items", None), ("items", "K"), ("whole", "O")} <= updates
    deletes = {(m.relation.table, m.old_kind) for m in messages if isinstance(m, Delete)}
    assert {("items", "K"), ("whole", "O")} <= deletes
    assert any(UNCHANGED in m.new for m in messages if isinstance(m, Update))
    assert any(None in m.new for m in messages if isinstance(m, Insert))
    truncates = [m for m in messages if isinstance(m, Truncate)]
    tables = [{relation.table for relation in m.relations} for m in truncates]
    assert tables == [{"parents", "logged", "children"}, {"logged"}]
    assert [(m.cascade, m.restart_identity) for m in truncates] == [(True, True), (False, False)]
    assert [(m.transactional, m.prefix, m.content) for m in messages if isinstance(m, Message)] == [
        (True, "within", b"transactional"),
        (False, "outside", b"not transactional"),
    ]
    assert [m for m in messages if isinstance(m, Origin)] == [Origin(0xABCDEF, ORIGIN)]
    assert [(m.schema, m.name) for m in messages if isinstance(m, Type)] == [("public", "mood")]
    wide = [m.columns[-1].name for m in messages if isinstance(m, Relation) and m.table == "whole"]
    assert wide == ["note", "more"]


def test_streams_and_prepared_transactions_end_as_in_the_history() -> None:
    aborts = [s.message for s in steps("streamed") if isinstance(s.message, StreamAbort)]
    assert [abort.xid == abort.subxid for abort in aborts] == [False, False, True, True]
    gids = [
        (type(s.message), s.message.gid)
        for name in ("prepared", "streamed_prepared")
        for s in steps(name)
        if isinstance(s.message, BeginPrepare | StreamPrepare | RollbackPrepared)
    ]
    assert gids == [
        (BeginPrepare, "gid 1"),
        (BeginPrepare, "gid 2"),
        (RollbackPrepared, "gid 2"),
        (StreamPrepare, "gid 1"),
        (StreamPrepare, "gid 2"),
        (RollbackPrepared, "gid 2"),
    ]


def test_every_truncation_is_a_decode_error_that_tells_where() -> None:
    for step in distinct():
        lsn, data = step.recorded
        relation = relation_of(step)
        for length in range(len(data)):
            with pytest.raises(DecodeError, match="at offset") as caught:
                decoder_of(step).decode(data[:length], lsn)
            assert caught.value.lsn == lsn
            if relation is not None and length >= 5 + 4 * step.streamed:
                assert caught.value.subject == f"{relation.schema}.{relation.table}"


def test_every_flipped_bit_is_a_decode_error_or_a_message_in_bounded_memory() -> None:
    cases = list(distinct())
    tracemalloc.start()
    try:
        for step in cases:
            _flip_every_bit(step)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < DAMAGE_BYTES_MAX


def _flip_every_bit(step: Step) -> None:
    lsn, data = step.recorded
    damaged = bytearray(data)
    decoder, known = decoder_of(step), step.decoder.relations
    for position in range(len(data) * 8):
        damaged[position // 8] ^= 1 << position % 8
        try:
            message = decoder.decode(bytes(damaged), lsn)
        except DecodeError as error:
            assert error.lsn == lsn
            assert "offset" in error.message
        else:
            assert type(message) in KINDS
            if type(message) is Relation:
                decoder.relations = dict(known)
        damaged[position // 8] ^= 1 << position % 8


@pytest.mark.long
def test_the_recording_is_what_the_server_sends_today(
    pair: Provider, fresh_database: str, topic_prefix: str
) -> None:
    now = record(pair.primary.conninfo(fresh_database), topic_prefix)
    assert now.contents == recording().contents
    for name in NAMES:
        assert transcript(now.messages[name]) == transcript(recording().messages[name]), name
