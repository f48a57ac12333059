"""Brings an epoch into a table in one commit, and only into the table that the writer knows.

    begin    the table has the epoch that this writer left it with, else another writer has come
    write    snapshots go to a branch of this writer's own (Spark's write-audit-publish)
    adopt    one commit: the branch becomes the table, which gets the epoch, its LSN and its tag;
             it is prepared here, and published with those of other tables (epochs/publication)

Nothing of an epoch is to be seen before that commit. A writer that was paused and overtaken is
refused by `begin`, or by `adopt`: the table is not the one its branch began at. What is left of a
branch by a kill is removed by the next `begin`; so is the branch of another writer that goes on,
which `written` refuses then: Spark makes it anew for what comes next, without what came before.

A rebuild has a branch of its own in the table, REBUILT, which stays from epoch to epoch:

    begin_side   the branch begins at the table as it is, with a note of how far it is: at nothing
    begin        a writer's branch begins at the rebuild's (`side`), where its note is the writer's
    extend       one commit: the writer's branch becomes the rebuild's, with its note
    adopt        as above; what was the table stays only under its tags
"""

import contextlib
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import structlog
from pyspark.sql import SparkSession

from spark_consumers.iceberg import catalog, commits, rollback
from spark_consumers.iceberg.evolution import drop_columns
from spark_consumers.iceberg.table_note import PROPERTY, Parked, RebuildNote, TableNote, note_of
from spark_consumers.iceberg.tables import State, is_large, merge_mode, state_of
from spark_consumers.sql import quoted

log = structlog.get_logger()
BRANCH = "slotbridge_epoch"
"""How the names of the branches begin."""
REBUILT = "slotbridge_rebuild"
"""The branch of a table that a rebuild fills."""
_STAGED_WRITES = "write.wap.enabled"
_WRITE_TO = "spark.wap.branch"


class Base(NamedTuple):
    """The table as it was when an epoch began.

    `snapshot`: the table's last snapshot, None while it has none. `head`: the branch's last
    snapshot, None until the branch is written. `side`: the last snapshot of the rebuild's branch
    that the branch began at, None where it began at the table. `sequence`: the table's last
    sequence number; what is written later has a higher one.
    """

    identifier: str
    snapshot: int | None
    head: int | None = None
    side: int | None = None
    sequence: int = 0


class _Written(NamedTuple):
    """A snapshot: its parent's id, None for a first one, and the branch it was written to."""

    parent: int | None
    writer: str | None


class Staging:
    """The branches of one writer."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._branch = f"{BRANCH}_{uuid.uuid4().hex[:12]}"

    @property
    def name(self) -> str:
        """The name of this writer's branches."""
        return self._branch

    def begin(
        self,
        identifier: str,
        sealed: tuple[int, int],
        *,
        explicit: bool = False,
        rebuilt: int | None = None,
    ) -> Base:
        """Prepare a table for an epoch after `sealed` (epoch and commit LSN, -1 for none).

        The branch is made at once: one that a write makes would count the table's rows and bytes
        from zero in its snapshot's summary. `explicit`: so is that of a table without snapshots.
        `rebuilt`: it begins at the rebuild's branch, to which this writer has brought the events up
        to this commit LSN. Raise Retryable (LOCKED) where the table has another epoch, or no such
        branch, or one that another writer has brought elsewhere. Raise OperatorNeeded where the
        table was rolled back behind its last epoch; with `explicit` or `rebuilt` its rows are of no
        importance.
        """
        table = catalog.load(self._spark, identifier)
        found = catalog.require_known(table, identifier, sealed)
        of_rebuild = rebuilt is not None
        if not (of_rebuild or explicit) and rollback.rolled_back(table, found):
            raise rollback.refused(identifier)
        snapshot = catalog.snapshot_id(table)
        side = catalog.ref_snapshot(table, REBUILT) if of_rebuild else None
        if of_rebuild and (side is None or _rebuilt_to(found) != rebuilt):
            raise catalog.overtaken(identifier)
        start = snapshot if side is None else side
        sequence = int(table.operations().current().lastSequenceNumber())
        left = [name for name in catalog.ref_names(table) if name.startswith(BRANCH)]
        anew = explicit or start is not None
        if left or anew:
            manage = table.manageSnapshots()
            for name in left:
                manage.removeBranch(name)
            if anew:
                arguments = [self._branch] if start is None else [self._branch, start]
                manage.createBranch(*arguments)
            manage.commit()
        if found.get(_STAGED_WRITES) != "true":  # made by an earlier version
            catalog.set_property(table, _STAGED_WRITES, "true")
        return Base(identifier, snapshot, side=side, sequence=sequence)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Let this session write to, and read from, the branches of the tables that have begun."""
        writer = catalog.SUMMARY_OPTION + catalog.WRITER
        with self._options({_WRITE_TO: self._branch, writer: self._branch}):
            yield

    @contextlib.contextmanager
    def writing_part(self) -> Iterator[None]:
        """Write as in `writing`, and mark the snapshots as a rebuild's, which are of no epoch."""
        for name in (catalog.EPOCH, catalog.COMMIT_LSN):
            self._spark.conf.unset(catalog.SUMMARY_OPTION + name)
        with self._options({catalog.SUMMARY_OPTION + catalog.REBUILD: "part"}), self.writing():
            yield

    @contextlib.contextmanager
    def _options(self, values: Mapping[str, str]) -> Iterator[None]:
        """Set options of the session, and unset them at the end."""
        for name, value in values.items():
            self._spark.conf.set(name, value)
        try:
            yield
        finally:
            for name in values:
                self._spark.conf.unset(name)

    def written(self, base: Base) -> Base:
        """Return the base with the last snapshot of its branch: only that snapshot is adopted.

        Raise Retryable (LOCKED) where another writer has removed the branch since `begin`. Spark
        makes it anew for what is written then: after the table's rows, without what was written to
        the branch before, or without those of a rebuild.
        """
        table = catalog.load(self._spark, base.identifier)
        head = catalog.ref_snapshot(table, self._branch)
        if not self._is_whole(base, head, _snapshots_after(table, base.sequence)):
            raise catalog.overtaken(base.identifier)
        return base._replace(head=head)

    def _is_whole(self, base: Base, head: int | None, since: Mapping[int, "_Written"]) -> bool:
        """Tell whether a branch, up to `head`, has what it began at and all that was written to it.

        `since`: the table's snapshots since then, by their ids; some may have been expired.
        """
        ours = {number for number, snapshot in since.items() if snapshot.writer == self._branch}
        start, number = base.snapshot if base.side is None else base.side, head
        while number is not None and number in since and number not in (start, base.snapshot):
            ours.discard(number)
            number = since[number].parent
        return not ours and (number == start or number not in (None, base.snapshot))

    def branch(self, base: Base) -> str:
        """Return the quoted name of a table's branch; the table's own where nothing was written."""
        if base.head is None:
            return base.identifier
        return f"{base.identifier}.{quoted(f'branch_{self._branch}')}"

    def adopt(
        self,
        base: Base,
        values: Mapping[str, str],
        tag: str,
        unset: Collection[str],
        note_after: Callable[[TableNote], TableNote],
        drops: Collection[str] = (),
    ) -> "Adopted":
        """Prepare the commit that makes the branch the table, and sets and removes properties.

        `note_after` changes the table's note. The commit also tags the last snapshot, and drops
        columns (`drops`). Nothing is to be committed if
        that is done already, while the commit of another table was refused. Raise Retryable
        (LOCKED) where somebody else has changed the table since `begin`.
        """
        table = catalog.load(self._spark, base.identifier)
        transaction = table.newTransaction()  # loads the table anew: what follows sees that one
        head, found = catalog.ref_snapshot(table, self._branch), catalog.properties(table)
        if head is None and self._adopted(base, table, found, values):
            large = is_large(catalog.summary(table))
            state = state_of(base.identifier, table, found, large=large)
            return Adopted(state, base.head, None)
        if catalog.snapshot_id(table) != base.snapshot or head != base.head:
            raise catalog.overtaken(base.identifier)
        if base.side is not None and catalog.ref_snapshot(table, REBUILT) != base.side:
            raise catalog.overtaken(base.identifier)
        refs = catalog.ref_names(table)
        number = base.snapshot if head is None else head
        snapshot = None if number is None else table.snapshot(number)
        large = is_large(catalog.summary_of(snapshot))
        note = note_after(note_of(found)).text()
        values = {**values, **merge_mode(large=large)} | ({PROPERTY: note} if note else {})
        unset = [*unset, *([] if note else [PROPERTY])]
        update = transaction.updateProperties()
        for name, value in values.items():
            update.set(name, value)
        for name in unset:
            update.remove(name)
        update.commit()
        if drops:
            drop_columns(transaction, drops)
        if number is not None:
            manage = transaction.manageSnapshots()
            if head is not None:
                if base.side is None:
                    manage.fastForwardBranch("main", self._branch)
                else:
                    # By name: this makes the branch of a table that has none yet.
                    manage.replaceBranch("main", self._branch).removeBranch(REBUILT)
                manage.removeBranch(self._branch)
            (manage.replaceTag if tag in refs else manage.createTag)(tag, number)
            manage.commit()
        properties = {n: v for n, v in (found | values).items() if n not in unset}
        state = state_of(base.identifier, transaction.table(), properties, large=large)
        return Adopted(state, number, transaction)

    @staticmethod
    def _adopted(
        base: Base, table: Any, properties: Mapping[str, str], values: Mapping[str, str]
    ) -> bool:
        """Tell whether the table has what was written to the branch, with the epoch's number."""
        written = base.head is not None and catalog.snapshot_id(table) == base.head
        return written and properties.get(catalog.EPOCH) == values[catalog.EPOCH]

    def extend(self, base: Base, rebuild: RebuildNote, values: Mapping[str, str]) -> None:
        """Make the branch the rebuild's, note how far it is and set properties, in one commit.

        Raise Retryable (LOCKED) where somebody else has changed one of them since `begin`.
        """

        def make(table: Any, transaction: Any) -> None:
            head = catalog.ref_snapshot(table, self._branch)
            same = catalog.ref_snapshot(table, REBUILT) == base.side and head == base.head
            if not same or head is None:
                raise catalog.overtaken(base.identifier)
            _put_rebuild(table, transaction, base.identifier, rebuild)
            catalog.set_properties(transaction, values)
            manage = transaction.manageSnapshots()
            if head != base.side:
                manage.replaceBranch(REBUILT, head)
            manage.removeBranch(self._branch).commit()

        commits.change(self._spark, base.identifier, None, make)


def begin_side(
    spark: SparkSession, identifier: str, sealed: tuple[int, int], rebuild: RebuildNote
) -> None:
    """Make a rebuild's branch, or replace it, and note the rebuild, in one commit.

    `sealed`: the epoch and commit LSN of the table's writer. Raise Retryable (LOCKED) where the
    table has another epoch, or nobody asks for this rebuild any more.
    """

    def make(table: Any, transaction: Any) -> None:
        _put_rebuild(table, transaction, identifier, rebuild)
        snapshot, manage = catalog.snapshot_id(table), transaction.manageSnapshots()
        if catalog.ref_snapshot(table, REBUILT) is not None:
            manage.removeBranch(REBUILT)
        manage.createBranch(*([REBUILT] if snapshot is None else [REBUILT, snapshot])).commit()

    commits.change(spark, identifier, sealed, make)


def _put_rebuild(table: Any, transaction: Any, identifier: str, rebuild: RebuildNote) -> None:
    """Note how far a rebuild is; raise Retryable (LOCKED) where nobody asks for it any more."""
    note = note_of(catalog.properties(table))
    if note.rebuild is None or note.rebuild.request != rebuild.request:
        raise catalog.overtaken(identifier)
    commits.put_note(transaction, replace(note, rebuild=rebuild))


def _snapshots_after(table: Any, sequence: int) -> dict[int, _Written]:
    """Return a table's snapshots with a higher sequence number, by their ids.

    Each snapshot gets the next number, and Iceberg keeps them in this order: the last few are
    looked at. A REST server may tell them in any other, as iceberg-rust does: then more are.
    """
    found: dict[int, _Written] = {}
    metadata = table.operations().current()
    snapshots, added = metadata.snapshots(), int(metadata.lastSequenceNumber()) - sequence
    for at in reversed(range(int(snapshots.size()))):
        if len(found) == added:
            break
        snapshot = snapshots.get(at)
        if int(snapshot.sequenceNumber()) > sequence:
            parent, writer = snapshot.parentId(), snapshot.summary().get(catalog.WRITER)
            found[int(snapshot.snapshotId())] = _Written(parent and int(parent), writer)
    return found


def _rebuilt_to(properties: Mapping[str, str]) -> int | None:
    """Return the commit LSN of a rebuild's branch, by a table's properties; None without a note."""
    rebuild = note_of(properties).rebuild
    return rebuild.commit_lsn if rebuild else None


def warn_emptied(source: str, kept: Sequence[str]) -> None:
    """Warn of the columns that a rebuild leaves without values, as the source has them no more."""
    if kept:
        log.warning(
            "a rebuild empties columns that the source has no more",
            table=source,
            columns=list(kept),
            remedy=f"to keep their values, `slottables rebuild --table {source} --cancel`; or copy "
            "them from the table or, once it is rebuilt, from its older tags",
        )


def park(
    spark: SparkSession,
    identifier: str,
    sealed: tuple[int, int],
    expected: Parked | None,
    parked: Parked,
) -> None:
    """Note that a table is parked, in one commit; a rebuild of it is over.

    `sealed`: the epoch and commit LSN of the table's writer; `expected`: the parking that it knows
    of. Raise Retryable (LOCKED) where the table has others.
    """

    def make(table: Any, transaction: Any) -> None:
        note = note_of(catalog.properties(table)).of_epoch(sealed[0])
        if note.parked != expected:
            raise catalog.overtaken(identifier)
        _without_side(table, transaction, note.park(parked))

    commits.change(spark, identifier, sealed, make)


def cancel(spark: SparkSession, identifier: str) -> None:
    """End a rebuild without a result, in one commit: nobody has asked for it then."""

    def make(table: Any, transaction: Any) -> None:
        _without_side(table, transaction, note_of(catalog.properties(table)).cancel())

    commits.change(spark, identifier, None, make)


def _without_side(table: Any, transaction: Any, note: TableNote) -> None:
    commits.put_note(transaction, note)
    if catalog.ref_snapshot(table, REBUILT) is not None:
        transaction.manageSnapshots().removeBranch(REBUILT).commit()


class Adopted(NamedTuple):
    """The state and the snapshot of a table that has an epoch once its transaction is committed.

    `transaction`: None where it is committed already.
    """

    state: State
    snapshot: int | None
    transaction: Any
