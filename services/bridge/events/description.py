"""The description of a relation: how it is published, told before its first change. Pure."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from services.bridge.events.event import Event, Stamp
from services.bridge.events.formats.table_format import PLAIN, TableFormat
from services.bridge.events.shaping.tables import TableShaping
from services.bridge.pgoutput.messages import Relation
from services.postgres.partitions import Partition


class Described(NamedTuple):
    """How a relation is published, and the schema event before its first change, if any.

    `settled` False: key or types are to be asked for again in the next transaction. `partitions`:
    those of the table, as the catalog has them now.
    """

    plan: TableShaping
    shape: Event | None = None
    settled: bool = True
    form: TableFormat = PLAIN
    partitions: Sequence[Partition] = ()


Describe = Callable[[Relation, Stamp, int], Described]
"""Told of a relation, as the server has described it, before its first change: with the number
(seq) that the change's event will have. What the server describes may be of no change at all."""
