"""The note on how far a rebuild is, and where its next part ends. Pure.

    slotbridge.rebuild_note   {asked, commit_lsn, offsets, topic_id, shape, replaced, …}

The note stands in the Iceberg table's properties, and changes in one commit with the branch that
the rebuild fills: after a kill the rebuild goes on from both.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from spark_consumers.events.shape import START, CommitPosition, Shape, last_replacement
from spark_consumers.iceberg.tables import NEVER

_PART_OF_READ = 20


@dataclass(frozen=True, slots=True)
class RebuildNote:
    """The branch of a rebuild has the events up to `commit_lsn`, NEVER for none.

    `asked` tells one rebuild from a later one, `topic_id` the topic from one that was made anew.
    `shape`: the event since which the source has the shape that the branch follows. `offsets`:
    where the next events are, by partition. `replaced`: from this event on the source is another
    table, and the branch has nothing of the former. `settled`: a part has read the topic to its
    end; what comes then is in order. `whole`: the first part reads all of the topic.
    """

    asked: str
    topic_id: str
    shape: CommitPosition = START
    commit_lsn: int = NEVER
    offsets: Mapping[int, int] | None = None
    replaced: CommitPosition = START
    settled: bool = False
    whole: bool = False

    def text(self) -> str:
        """Return the note as JSON."""
        return json.dumps(asdict(self))

    def start(self, partition: int) -> int:
        """Return the offset of the next event in a partition."""
        return (self.offsets or {}).get(partition, 0)


def rebuild_note_from(text: str) -> RebuildNote:
    """Return the note that `RebuildNote.text` has written."""
    found = json.loads(text)
    offsets = found["offsets"] and {int(n): at for n, at in found["offsets"].items()}
    positions = {name: CommitPosition(*found[name]) for name in ("shape", "replaced")}
    return RebuildNote(**found | {"offsets": offsets} | positions)


def part_end(
    tails: Mapping[int, int | None],
    unread: Iterable[int],
    shapes: Iterable[Shape],
    after_lsn: int,
    limit_lsn: int,
) -> int:
    """Return the commit LSN up to which records hold all events; `after_lsn` where for none.

    `tails`: the last commit LSN among the records of each partition, None without events. `unread`:
    partitions that have more records; the last transaction there may go on. A part ends before a
    transaction that changes a shape, unless it begins there.
    """
    ends = [limit_lsn]
    for partition in unread:
        tail = tails.get(partition)
        ends.append(after_lsn if tail is None else tail - 1)
    ends += [s.since.commit_lsn - 1 for s in shapes if s.since.commit_lsn > after_lsn + 1]
    return max(after_lsn, min(ends))


def part_records(read: int, recent: int, least: int) -> int:
    """Return how many records the part after the first `read` records has.

    A part grows with the branch, all keys of which it may read; and a rebuild must be faster than
    the epochs, the last of which had `recent` events.
    """
    return max(least, 2 * recent, read // _PART_OF_READ)


def replaced_since(shapes: Sequence[Shape], note: RebuildNote) -> CommitPosition | None:
    """Return from where on the source is another table, of which the branch has nothing yet."""
    found = last_replacement(shapes)
    return found if found is not None and found > note.replaced else None


def part_offsets(starts: Mapping[int, int], last: Mapping[int, int], most: int) -> dict[int, int]:
    """Return where to end in each partition so that about `most` records lie before."""
    open_ = sum(starts[n] < at for n, at in last.items())
    each = max(1, most // max(open_, 1))
    return {n: min(at, max(starts[n] + each, 0)) for n, at in last.items()}
