"""Where the parts of a rebuild end, and how large they are. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from spark_consumers.events.shape import CommitPosition, Shape, last_replacement
from spark_consumers.iceberg.table_note import RebuildNote

_PART_OF_READ = 20


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
