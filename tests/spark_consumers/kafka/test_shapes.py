"""Where a name went to a table with other rows than its topic brings: pure."""

import re
from collections.abc import Mapping

import pytest

from spark_consumers.events.shape import CommitPosition, Shape
from spark_consumers.iceberg.table_note import NEVER
from spark_consumers.kafka.shapes import last_take_over

NEW, OTHER = "public.t_new", "public.t_other"


def shape(oid: int, commit_lsn: int) -> Shape:
    return Shape("public", "t", (), (), oid, CommitPosition(commit_lsn, 0))


def names(**others: int) -> Mapping[int, Mapping[str, CommitPosition]]:
    """The names of three tables besides t: `new=200` is that of 2, `other=400` that of 3."""
    places = {name: CommitPosition(lsn, 0) for name, lsn in others.items()}
    found = {2: ("new", NEW), 3: ("other", OTHER)}
    return {oid: {name: places[key]} for oid, (key, name) in found.items() if key in places}


FIRST, SWAPPED, WIDER, AGAIN = shape(1, 100), shape(2, 300), shape(2, 350), shape(3, 500)
BACK, BACK_WIDER = shape(1, 500), shape(1, 550)


def judged(
    shapes: list[Shape],
    others: Mapping[int, Mapping[str, CommitPosition]],
    columns: Shape | None = None,
    has_lsn: int = NEVER,
) -> tuple[int, str] | None:
    """Where the name was taken over, and the former name of the table that has it now."""
    found = last_take_over(shapes, others, columns, has_lsn)
    name = re.compile(r"public\.\w+|before another one")
    return (found[0], *name.findall(found[1])) if found else None


@pytest.mark.parametrize(
    ("shapes", "others", "expected"),
    [
        ([FIRST], {}, None),
        ([FIRST, SWAPPED], {}, None),
        ([FIRST, SWAPPED], {"new": 200}, (300, NEW)),
        ([FIRST, SWAPPED, WIDER], {"new": 200}, (300, NEW)),
        ([SWAPPED], {"new": 400}, None),
        ([FIRST, SWAPPED, AGAIN], {"new": 200, "other": 400}, (500, OTHER)),
        ([FIRST, SWAPPED, AGAIN], {"new": 200}, None),
        ([FIRST, SWAPPED, BACK], {}, (500, "before another one")),
        ([FIRST, SWAPPED, BACK, BACK_WIDER], {}, (500, "before another one")),
    ],
)
def test_the_last_table_with_another_name_is_the_one(
    shapes: list[Shape], others: dict[str, int], expected: tuple[int, str] | None
) -> None:
    assert judged(shapes, names(**others)) == expected


@pytest.mark.parametrize("has_lsn", [NEVER, 100, 299])
@pytest.mark.parametrize("columns", [None, SWAPPED, WIDER])
def test_columns_that_are_ahead_of_the_rows_hide_nothing(
    columns: Shape | None, has_lsn: int
) -> None:
    """As after a kill, and where a rebuild has changed them."""
    shapes = [FIRST, SWAPPED, WIDER]
    assert judged(shapes, names(new=200), columns, has_lsn) == (300, NEW)


def test_rows_that_come_later_than_the_columns_shape_are_judged_by_the_shape() -> None:
    """Epochs without events of the table leave its columns as they are."""
    assert judged([FIRST, SWAPPED], names(new=200), FIRST, 400) == (300, NEW)


def test_what_the_rows_have_is_not_judged_again() -> None:
    """Neither a change of the same table's columns, nor where an earlier one took the name over."""
    both = names(new=200, other=400)
    assert judged([FIRST, SWAPPED, WIDER], both, SWAPPED, 300) is None
    assert judged([FIRST, SWAPPED, AGAIN], both, AGAIN, 500) is None
    assert judged([shape(0, NEVER), WIDER], both, SWAPPED, 300) is None, "a compacted topic"
    back = [FIRST, SWAPPED, BACK, BACK_WIDER]
    assert judged(back, both, BACK, 500) is None
    assert judged(back[:3], both, SWAPPED, 400) == (500, "before another one")
