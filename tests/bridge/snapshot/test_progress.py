"""The pure core of snapshots: where a chunk belongs, its SQL, its size, what is read next."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.errors import SettingsError
from schemas.shaping import MaskSettings, ShapingSettings
from schemas.snapshot import SnapshotProgress, SnapshotSettings
from services.bridge.events.shaping.tables import Shaping
from services.bridge.pgoutput.messages import Relation, RelationColumn
from services.bridge.snapshot.pace import ChunkSize, Patience, RateLimit
from services.bridge.snapshot.places import Blocks
from services.bridge.snapshot.progress import (
    ChunkPosition,
    Owner,
    SnapshotPlan,
    TableProgress,
    counts,
    goes_on,
    plan,
    progress_event,
    progress_of,
)
from services.bridge.snapshot.ranges import joined, share_of
from services.bridge.snapshot.readable import refuse_unfit, require_all_read, require_readable
from services.bridge.snapshot.tables import (
    Chunk,
    KeyColumn,
    KeyRange,
    SettingsCondition,
    TableShape,
    bounds_query,
    chunk_query,
    shape_difference,
)
from services.bridge.snapshot.visibility import PublishedXids, Sight, parse_sight, with_epoch

KEYS = 6
EPOCH = 7 * 2**32
WHOLE = KeyRange(None, None)
OWNER = Owner("s", 3, 10_000, {1: 100, 2: 500})


class Source:
    """A table under transactions. A commit is in the stream before it is visible to snapshots, and
    keeps its keys locked until then, as PostgreSQL does."""

    def __init__(self, first_xid: int) -> None:
        self.next_xid = first_xid
        self.completed = first_xid - 1
        self.open: dict[int, dict[int, int | None]] = {}
        self.stream: list[tuple[int, dict[int, int | None]]] = []
        self.waiting: list[int] = []
        self.value = 0

    def begin(self, keys: set[int]) -> None:
        """A transaction writes or deletes those keys that nobody has locked."""
        hidden = [changes for xid, changes in self.stream if xid in self.waiting]
        locked = {key for changes in (*self.open.values(), *hidden) for key in changes}
        changes: dict[int, int | None] = {}
        for key in keys - locked:
            self.value += 1
            changes[key] = self.value if self.value % 4 else None
        self.open[self.next_xid] = changes
        self.next_xid += 1

    def commit(self, number: int) -> None:
        """A commit record is written; it is not visible yet."""
        if self.open:
            xid = [*self.open][number % len(self.open)]
            self.stream.append((xid, self.open.pop(xid)))
            self.waiting.append(xid)

    def show(self, number: int) -> None:
        """A commit becomes visible, in any order."""
        if self.waiting:
            shown = self.waiting.pop(number % len(self.waiting))
            self.completed = max(self.completed, shown)

    def floor(self) -> int:
        """A small transaction of its own: its xid is above that of every one before."""
        self.completed = self.next_xid
        self.next_xid += 1
        return self.completed

    def sight(self) -> Sight:
        """A snapshot as it would be taken now."""
        xmax = self.completed + 1  # procarray.c: a later transaction may have begun already
        running = frozenset(xid for xid in (*self.open, *self.waiting) if xid < xmax)
        return Sight(min(running, default=xmax), xmax, running)

    def rows(self, sight: Sight) -> dict[int, int]:
        """What that snapshot sees."""
        return self._after(changes for xid, changes in self.stream if sight.sees(xid % 2**32))

    def replayed_rows(self) -> dict[int, int]:
        """What a standby shows that has replayed the WAL up to its end."""
        return self._after(changes for _, changes in self.stream)

    def _after(self, seen: Iterable[dict[int, int | None]]) -> dict[int, int]:
        before = [(key, 0) for key in range(0, KEYS, 2)]
        return applied([*before, *(change for changes in seen for change in changes.items())])


def applied(changes: Any) -> dict[int, int]:
    rows: dict[int, int] = {}
    for key, value in changes:
        rows.pop(key, None)
        if value is not None:
            rows[key] = value
    return rows


CHUNKS = st.tuples(st.sampled_from([None, 0, 1, 2]), st.sampled_from([None, 0, 1]), st.booleans())
"""How far a standby is ahead, which of two ranges is cut by its size, and whether a SIGKILL comes
before Kafka commits."""
CALM = (None, None, False)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sets(st.integers(0, KEYS - 1), min_size=1, max_size=3)),
        st.tuples(st.sampled_from(["commit", "show"]), st.integers(0, 3)),
        st.tuples(st.just("publish"), st.just(0)),
        st.tuples(st.just("chunk"), CHUNKS),
        st.tuples(st.just("ahead"), st.sampled_from([None, 0, 1, 2])),
    ),
    max_size=60,
)


@given(STEPS, st.integers(0, 2))
@example([("begin", {0}), ("commit", 0), ("publish", 0), ("chunk", CALM), ("chunk", CALM)], 0)
@example(
    [
        *[("begin", {0}), ("commit", 0), ("show", 0), ("publish", 0)],
        *[("chunk", CALM), ("chunk", (0, None, False))],
    ],
    0,
)
def test_both_folds_are_the_table_whatever_is_visible_when(
    steps: list[tuple[str, Any]], offset: int
) -> None:
    """By the order of publication, and by position; from any point of the stream on.

    A chunk is read on the primary, or on a standby that has replayed what the primary's snapshot
    sees, and as many commits more as the step says; by two workers, each a range of one key. What
    is read ahead is what was to be seen then, wherever the stream has come since.
    """
    source = Source(EPOCH + 2**32 - offset * 20 + 3)
    events: list[tuple[int, int, int | None]] = []  # (position, key, value) by offset
    published, done, last, floor_known = PublishedXids(), 0, -1, False
    keys: list[int] = []
    ahead: tuple[int, Sight, dict[int, int]] | None = None

    def publish() -> None:
        nonlocal done
        if done < len(source.stream):
            xid, changes = source.stream[done]
            done += 1
            events.extend((2 * done, key, value) for key, value in changes.items())
            if floor_known:
                published.add([xid % 2**32])

    def look(standby: int | None) -> tuple[int, Sight, dict[int, int]]:
        sight = source.sight()
        for _ in range(standby or 0):
            source.commit(0)
        return last, sight, source.rows(sight) if standby is None else source.replayed_rows()

    def chunk(standby: int | None, cut: int | None, killed: bool) -> None:
        nonlocal last, floor_known, ahead
        if not floor_known:
            floor_known, published.floor = True, source.floor()
            return
        early, ahead = ahead, None
        if early and early[0] == last and published.seen_by(early[1]):
            rows = early[2]
        else:
            sight = source.sight()
            if not published.seen_by(sight):
                return
            rows = look(standby)[2]
        left = sorted(key for key in rows if key > last)
        ranges = [
            chunk_of(left[:1], ends=cut != 0),
            chunk_of(left[1:2], ends=cut != 1 and len(left) <= 2),
        ]
        found = joined(ranges, 2)
        if killed:
            return
        read = [int(part[at][1]) for part in found.parts for at in range(len(part))]
        assert found.last == ([f"{read[-1]}"] if read else None)
        events.extend((2 * done + 1, key, rows[key]) for key in read)
        keys.extend(read)
        last = KEYS if found.ends else max([last, *read])

    for name, argument in steps:
        if name == "publish":
            publish()
        elif name == "chunk":
            chunk(*argument)
        elif name == "ahead":
            ahead = look(argument)
        else:
            getattr(source, name)(argument)
    while source.open:
        source.commit(0)
    while source.waiting:
        source.show(0)
    while last < KEYS:
        chunk(*CALM)
    while done < len(source.stream):
        publish()
    assert keys == sorted({*keys}), "a key is read twice"
    truth = source.rows(source.sight())
    assert applied((key, value) for _, key, value in events) == truth
    in_order = sorted(events, key=lambda event: event[0])
    assert applied((key, value) for _, key, value in in_order) == truth


@given(st.integers(2**32, 2**40), st.integers(-(2**31) + 1, 2**31 - 1))
def test_xid_gets_the_nearest_epoch(near: int, distance: int) -> None:
    assert with_epoch((near + distance) % 2**32, near) == near + distance


def test_a_snapshot_as_the_server_prints_it() -> None:
    sight = parse_sight("10:20:10,15")
    assert [xid for xid in range(8, 22) if sight.sees(xid)] == [
        *(8, 9, 11, 12, 13, 14, 16, 17, 18, 19)
    ]
    assert parse_sight("7:7:") == Sight(7, 7, frozenset())
    assert parse_sight("147075:147071:") == Sight(147075, 147075, frozenset()), "of a new slot"


def chunk_of(keys: list[int], *, ends: bool) -> Chunk:
    rows = [(0, b"%d" % key) for key in keys]
    return Chunk([rows], [f"{keys[-1]}"] if keys else None, len(keys), ends)


def shape(name: str = "public.t", *key: str, oid: int = 1, row_filter: str = "") -> TableShape:
    schema, table = name.split(".")
    columns = tuple(RelationColumn(column, 23, -1, column in key) for column in (*key, "note"))
    keys = tuple(KeyColumn(column, "integer") for column in key)
    return TableShape(Relation(oid, schema, table, "d", columns), False, row_filter, keys)


def test_the_first_chunk_and_the_next_one() -> None:
    found = shape("public.t", "a", 'b"')
    assert chunk_query(found, WHOLE, "", 10) == (
        b'SELECT "a", "b""", "note", "a", "b""" FROM ONLY "public"."t" ORDER BY 4, 5 LIMIT 10',
        (1, b"I\0\0\0\1N\0\3", 3, 2, False),
        False,
    )
    whole = replace(found, partitioned=True)
    assert chunk_query(whole, KeyRange(["1", "it's \\"], None), "", 5).text == (
        b'SELECT "a", "b""", "note", "a", "b""" FROM "public"."t" WHERE ("a", "b""")'
        b" OPERATOR(pg_catalog.>) ('1'::integer, E'it''s \\\\'::integer) ORDER BY 4, 5 LIMIT 5"
    )


def test_the_range_of_a_worker_and_the_keys_that_part_ranges() -> None:
    found = shape("public.t", "a", 'b"')
    assert chunk_query(found, KeyRange(["1", "x"], ["5", "y"]), "", 5).text == (
        b'SELECT "a", "b""", "note", "a", "b""" FROM ONLY "public"."t"'
        b""" WHERE ("a", "b\"\"") OPERATOR(pg_catalog.>) ('1'::integer, 'x'::integer)"""
        b""" AND ("a", "b\"\"") OPERATOR(pg_catalog.<=) ('5'::integer, 'y'::integer)"""
        b" ORDER BY 4, 5 LIMIT 5"
    )
    assert bounds_query(found, ["1", "x"], 10, 3) == (
        b"SELECT k0, k1 FROM (SELECT *, row_number() OVER (ORDER BY k0, k1) AS number"
        b' FROM (SELECT "a", "b""" FROM ONLY "public"."t"'
        b""" WHERE ("a", "b\"\"") OPERATOR(pg_catalog.>) ('1'::integer, 'x'::integer)"""
        b' ORDER BY "a", "b""" LIMIT 30)'
        b" AS next (k0, k1)) AS numbered WHERE number % 10 = 0 ORDER BY number"
    )
    assert Blocks(10, 20, 99).bounds(3) == [["(13,0)"], ["(16,0)"]]
    assert Blocks(10, 11, 99).bounds(3) == []


@given(
    *(st.integers(1, 16), st.integers(1, 10**6), st.integers(1, 2**22)),
    st.none() | st.floats(0, 2**21),
)
def test_workers_share_the_rows_and_the_memory_of_one_chunk(
    workers: int, rows_max: int, bytes_max: int, row_bytes: float | None
) -> None:
    share = share_of(workers, rows_max, bytes_max, row_bytes)
    assert 1 <= share.ranges <= workers and share.rows >= 1
    assert share.ranges * share.rows <= rows_max
    assert share.ranges * share.bytes <= bytes_max
    if row_bytes is None:
        assert share == (1, min(rows_max, 1_000), bytes_max)
    else:
        assert share.rows == 1 or share.rows * row_bytes <= share.bytes


def test_a_chunk_of_a_filtered_table_looks_at_no_more_rows() -> None:
    found = shape("public.t", "id", row_filter="id > 1")
    assert chunk_query(found, KeyRange(["1"], None), SettingsCondition("note <> ''"), 5) == (
        b"SELECT CASE WHEN wanted THEN c0 END, CASE WHEN wanted THEN c1 END, k0, wanted"
        b' FROM (SELECT "id" AS c0, "note" AS c1, "id" AS k0,'
        b" ((id > 1) AND (note <> '')) IS TRUE AS wanted"
        b' FROM ONLY "public"."t" WHERE ("id") OPERATOR(pg_catalog.>)'
        b" ('1'::integer) ORDER BY 3 LIMIT 5) AS chunk ORDER BY 3",
        (1, b"I\0\0\0\1N\0\2", 2, 1, True),
        True,
    )


def test_the_operators_of_a_key_are_named_with_the_schema_of_each_columns_own() -> None:
    """One that is planted in a schema of the search_path may fit better than the type's own."""
    found = shape("public.t", "a", "b", "c")
    kinds = ("integer", "public.citext", "text")
    schemas = ("pg_catalog", "public", "pg_catalog")
    key = tuple(map(KeyColumn, ("a", "b", "c"), kinds, schemas))
    query = chunk_query(replace(found, key=key), KeyRange(["1", "x", "y"], None), "", 5)
    assert (
        b"""WHERE "a" OPERATOR(pg_catalog.>=) '1'::integer"""
        b""" AND ("a" OPERATOR(pg_catalog.>) '1'::integer"""
        b""" OR "b" OPERATOR(public.>=) 'x'::public.citext"""
        b""" AND ("b" OPERATOR(public.>) 'x'::public.citext"""
        b""" OR ("c") OPERATOR(pg_catalog.>) ('y'::text))) ORDER"""
    ) in query.text


def test_two_forms_of_a_table_are_told_apart_by_what_differs() -> None:
    found = shape("public.t", "a")
    other = replace(found, key=(KeyColumn("a", '"integer"'),))
    assert shape_difference(found, other).startswith("key (KeyColumn(name='a', type='\"integer\"'")
    assert shape_difference(found, None) == "it is not published any more"


@given(
    rate=st.integers(1, 5_000),
    chunks=st.lists(st.tuples(st.integers(0, 5_000), st.floats(0, 3)), max_size=30),
)
def test_no_more_rows_are_read_in_a_time_than_the_rate_allows(
    rate: int, chunks: list[tuple[int, float]]
) -> None:
    """But for the last chunk, which has the rows of one second at most."""
    limit, now, read = RateLimit(rate), 0.0, 0
    for rows, idle_s in chunks:
        now = max(now + idle_s, limit.due)
        few = min(rows, limit.bound(5_000))
        assert read <= rate * now + 1e-6
        limit.learn(few, now)
        read += few
    unlimited = RateLimit(None)
    unlimited.learn(5_000, 10.0)
    assert (unlimited.due, unlimited.bound(5_000)) == (0.0, 5_000)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 100)), max_size=30))
def test_a_chunk_is_never_empty_nor_above_the_limit(read: list[tuple[int, float]]) -> None:
    size = ChunkSize(5_000, 0.1)
    for rows, took_s in read:
        before = size.rows
        size.learn(rows, took_s)
        assert 1 <= size.rows <= min(5_000, 2 * before)
        size.shrink()
        assert size.rows >= 1


@given(st.lists(st.booleans(), max_size=30), st.floats(0.01, 10))
def test_patience_grows_while_it_is_in_vain_and_is_bounded(met: list[bool], first_s: float) -> None:
    patience = Patience(first_s)
    for came in met:
        before = patience.seconds
        (patience.met if came else patience.lost)()
        assert first_s <= patience.seconds <= max(first_s, Patience.LONGEST_S)
        assert patience.seconds <= before if came else patience.seconds >= before
    for _ in range(10):
        patience.met()
    assert patience.seconds == first_s


MASKS = {"public.secret": {"mail": MaskSettings(text="-")}}
SHAPING = Shaping(ShapingSettings(exclude=("public.hidden",), masks=MASKS), "p")


def planned(*told: SnapshotProgress, shapes: list[TableShape], **settings: Any) -> Any:
    return plan(shapes, told, SnapshotSettings(mode="initial", **settings), SHAPING, OWNER)


def progress(of: TableShape, **changed: Any) -> SnapshotProgress:
    table = planned(shapes=[of]).tables[of.name]
    table.last, table.rows, table.chunks = ["5"], 7, 2
    return progress_of(OWNER, table, ChunkPosition(900, 6, 910), 1, 0).model_copy(update=changed)


def test_tables_are_read_on_where_kafka_has_their_rows() -> None:
    one, two, three = (shape(f"public.t{n}", "id", oid=n) for n in (1, 2, 3))
    found = planned(
        progress(one, done=True),
        progress(two),
        progress(three, slot="another"),
        shapes=[three, one, two, shape("public.hidden", "id"), shape("public.left", "id")],
        exclude=["public.l*"],
    )
    assert [*found.tables] == ["public.t1", "public.t2", "public.t3"]
    assert (found.next.shape, found.next.last, found.next.rows) == (two, ["5"], 7)
    found.begun = True
    found.next.done = True
    assert (found.next.shape, found.next.last, found.next.rows) == (three, None, 0)
    assert found.kind(found.next, 0, 2, ends=True) == "true"
    assert found.kind(found.next, 1, 2, ends=True) == "last"
    assert found.kind(found.next, 1, 2, ends=False) == "true"


def test_each_snapshot_has_a_first_row() -> None:
    """The one before has ended where no table waited."""
    one, two = (shape(f"public.t{n}", "id", oid=n) for n in (1, 2))
    read, ended = progress(one, done=True), progress(one, done=True, waiting=0)
    for told, kind in ((read.model_copy(update={"waiting": 1}), "true"), (ended, "first")):
        found = planned(told, shapes=[one, two])
        found.begun = goes_on(found, told)
        assert found.kind(found.next, 0, 2, ends=False) == kind
    assert not goes_on(planned(shapes=[one]), None)


@pytest.mark.parametrize(
    ("changed", "still"),
    [
        ({}, True),
        ({"oid": 9}, False),
        ({"key": ["other"]}, False),
        ({"key": ["other"], "done": True}, True),
        ({"commit_lsn": 10_000}, False),
        ({"timeline": 2, "commit_lsn": 499, "seen_lsn": 0}, True),
        ({"timeline": 2, "commit_lsn": 500}, False),
        ({"timeline": 2, "commit_lsn": 499, "seen_lsn": 500}, True),
        ({"timeline": 2, "commit_lsn": 499, "seen_lsn": 501}, False),
        ({"timeline": 4}, False),
    ],
)
def test_rows_that_a_failover_or_another_table_has_overtaken_do_not_count(
    changed: dict[str, Any], still: bool
) -> None:
    found = shape("public.t", "id")
    assert counts(progress(found, **changed), found, OWNER) is still


def test_rows_that_may_show_what_a_failover_has_undone_are_named() -> None:
    found = shape("public.t", "id")
    seen = planned(progress(found, timeline=2, commit_lsn=499, seen_lsn=501), shapes=[found])
    assert (seen.undone, seen.next.rows) == (["public.t"], 0)
    assert not planned(progress(found), shapes=[found]).undone
    assert not planned(
        progress(found, timeline=2, commit_lsn=500, seen_lsn=501), shapes=[found]
    ).undone


def test_a_table_without_a_key_is_refused_by_name() -> None:
    found = planned(shapes=[shape("public.t", "id"), shape("public.log")])
    with pytest.raises(SettingsError, match=r"public\.log"):
        require_readable(found)
    require_readable(planned(shapes=[shape("public.log")], exclude=["public.log"]))


def test_a_table_whose_key_is_masked_is_refused_as_its_progress_would_tell_it() -> None:
    secret = shape("public.secret", "mail")
    relation = replace(secret.relation, replica_identity="f")
    columns = tuple(replace(column, key=False) for column in relation.columns)
    secret = replace(secret, relation=replace(relation, columns=columns))
    with pytest.raises(SettingsError, match=r"public\.secret is read by mail"):
        require_readable(planned(shapes=[secret]))


def test_a_table_that_its_settings_fit_no_more_stops_nothing_else() -> None:
    """The stream may have changes from before it was altered, which they still fit."""
    shaping = Shaping(ShapingSettings(computed={"public.t": {"shout": "renamed + '!'"}}), "p")
    shapes = [shape("public.t", "id"), shape("public.u", "id", oid=2)]
    found = plan(shapes, (), SnapshotSettings(mode="initial"), shaping, OWNER)
    refuse_unfit(found, shaping)
    assert [*found.tables] == ["public.u"]
    assert "does not fit the settings" in found.refused["public.t"]
    assert "renamed" in found.refused["public.t"]
    require_readable(found)
    with pytest.raises(SettingsError, match="renamed") as raised:
        require_all_read(found)
    assert raised.value.hint == found.unfit["public.t"] != ""
    assert "GRANT" not in raised.value.hint


def test_settings_that_no_start_has_judged_refuse_the_first_rows() -> None:
    """They never fitted, as far as anybody knows: the first start must not pass over them."""
    shaping = Shaping(ShapingSettings(columns={"public.t": {"exclude": ["id"]}}), "p")
    found = plan([shape("public.t", "id")], (), SnapshotSettings(mode="initial"), shaping, OWNER)
    refuse_unfit(found, shaping)
    with pytest.raises(SettingsError, match=r"public\.t does not fit the settings") as raised:
        require_readable(found)
    assert "GRANT" not in raised.value.hint and "shaping" in raised.value.hint


@pytest.mark.parametrize("key", [("id",), ()])
def test_under_replica_identity_full_other_columns_may_be_left_out(key: tuple[str, ...]) -> None:
    """pgoutput flags all columns of such a table; the key of its events is the primary key."""
    plain = shape("public.t", *key)
    columns = tuple(RelationColumn(name, 25, -1, True) for name in ("id", "note", "secret"))
    full = replace(plain.relation, replica_identity="f", columns=columns)
    given = {"columns": {"public.t": {"exclude": ["secret"]}}}
    shaping = Shaping(ShapingSettings.model_validate(given), "p")
    found = SnapshotPlan({"public.t": TableProgress(replace(plain, relation=full))})
    refuse_unfit(found, shaping)
    assert ([*found.tables], found.refused) == (["public.t"], {})


def test_rows_that_are_read_need_no_settings_that_fit() -> None:
    shaping = Shaping(ShapingSettings(computed={"public.t": {"shout": "renamed + '!'"}}), "p")
    whole = shape("public.t", "id")
    told = [progress(whole, done=True)]
    found = plan([whole], told, SnapshotSettings(mode="initial"), shaping, OWNER)
    refuse_unfit(found, shaping)
    assert (found.done, found.refused) == (1, {})


def test_progress_survives_its_record() -> None:
    told = progress(shape("public.t", "id"))
    event = progress_event("p", told)
    assert event.topic == "p.snapshot"
    assert event.key == b'{"slot":"s","schema":"public","table":"t"}'
    assert SnapshotProgress.model_validate_json(event.value or b"") == told
