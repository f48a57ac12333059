"""Brings an epoch into a table in one commit, and only into the table that the writer knows.

    begin    the table has the epoch that this writer left it with, else another writer has come
    write    snapshots go to a branch of this writer's own (Spark's write-audit-publish)
    adopt    one commit: the branch becomes the table, which gets the epoch, its LSN and its tag

Nothing of an epoch is to be seen before `adopt`. A writer that was paused and overtaken is refused
by `begin`, or by `adopt`: the table is not the one its branch began at. What is left of a branch
by a kill is removed by the next `begin`.
"""

import contextlib
import uuid
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from pyspark.sql import SparkSession

from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.tables import State, is_large, merge_mode, state_of
from spark_consumers.sql import quoted

BRANCH = "slotbridge_epoch"
"""How the names of the branches begin."""
_STAGED_WRITES = "write.wap.enabled"
_WRITE_TO = "spark.wap.branch"


class Base(NamedTuple):
    """The table as it was when an epoch began.

    `snapshot`: the table's last snapshot, None while it has none. `head`: the branch's last
    snapshot, None until the branch is written.
    """

    identifier: str
    snapshot: int | None
    head: int | None = None


class Staging:
    """The branches of one writer."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._branch = f"{BRANCH}_{uuid.uuid4().hex[:12]}"

    @property
    def name(self) -> str:
        """The name of this writer's branches."""
        return self._branch

    def begin(self, identifier: str, known: tuple[int, int], *, explicit: bool = False) -> Base:
        """Prepare a table for an epoch after `known` (epoch and commit LSN, -1 for none).

        The branch is made at once: one that a write makes would count the table's rows and bytes
        from zero in its snapshot's summary. `explicit`: so is that of a table without snapshots.
        Raise Retryable (NOT_READY) where the table has another epoch.
        """
        table = catalog.load(self._spark, identifier)
        found = catalog.require_known(table, identifier, known)
        snapshot = catalog.snapshot_id(table)
        left = [name for name in catalog.ref_names(table) if name.startswith(BRANCH)]
        anew = explicit or snapshot is not None
        if left or anew:
            manage = table.manageSnapshots()
            for name in left:
                manage.removeBranch(name)
            if anew:
                arguments = [self._branch] if snapshot is None else [self._branch, snapshot]
                manage.createBranch(*arguments)
            manage.commit()
        if found.get(_STAGED_WRITES) != "true":  # made by an earlier version
            catalog.set_property(table, _STAGED_WRITES, "true")
        return Base(identifier, snapshot)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Let this session write to, and read from, the branches of the tables that have begun."""
        self._spark.conf.set(_WRITE_TO, self._branch)
        try:
            yield
        finally:
            self._spark.conf.unset(_WRITE_TO)

    def written(self, base: Base) -> Base:
        """Return the base with the last snapshot of its branch: only that snapshot is adopted."""
        table = catalog.load(self._spark, base.identifier)
        return base._replace(head=catalog.ref_snapshot(table, self._branch))

    def branch(self, base: Base) -> str:
        """Return the quoted name of a table's branch; the table's own where nothing was written."""
        if base.head is None:
            return base.identifier
        return f"{base.identifier}.{quoted(f'branch_{self._branch}')}"

    def adopt(
        self, base: Base, values: Mapping[str, str], tag: str, unset: Collection[str]
    ) -> "Adopted":
        """Make the branch the table, and set and remove properties, in one commit.

        The commit also tags the last snapshot. Raise Retryable (NOT_READY) where somebody else has
        changed the table since `begin`.
        """
        table = catalog.load(self._spark, base.identifier)
        head = catalog.ref_snapshot(table, self._branch)
        if catalog.snapshot_id(table) != base.snapshot or head != base.head:
            raise catalog.overtaken(base.identifier)
        found = catalog.properties(table)
        refs = catalog.ref_names(table)
        number = base.snapshot if head is None else head
        snapshot = None if number is None else table.snapshot(number)
        large = is_large(catalog.summary_of(snapshot))
        values = {**values, **merge_mode(large=large)}
        transaction = table.newTransaction()
        update = transaction.updateProperties()
        for name, value in values.items():
            update.set(name, value)
        for name in unset:
            update.remove(name)
        update.commit()
        if number is not None:
            manage = transaction.manageSnapshots()
            if head is not None:
                manage.fastForwardBranch("main", self._branch).removeBranch(self._branch)
            (manage.replaceTag if tag in refs else manage.createTag)(tag, number)
            manage.commit()
        transaction.commitTransaction()
        properties = {n: v for n, v in (found | values).items() if n not in unset}
        return Adopted(state_of(base.identifier, table, properties, large=large), number)


class Adopted(NamedTuple):
    """The state and the snapshot of a table that was given an epoch."""

    state: State
    snapshot: int | None
