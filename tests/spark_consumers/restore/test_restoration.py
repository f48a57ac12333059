"""What `slottables restore` says of tables that are not all that their source was."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.naming import Naming
from schemas.shaping import MaskSettings, ShapingSettings
from spark_consumers.restore.restoration import Restoration, Restored

RESTORED = Restored(
    "public.t", 2, {}, [], lacks_events=False, within_snapshot=False, left_out=[], masked=[]
)


@pytest.mark.parametrize(
    ("hidden", "told"),
    [
        ({}, "public.t: 2 rows"),
        ({"left_out": ["a", "b"]}, "public.t: 2 rows; left out by the table's rule: a, b"),
        ({"masked": ["c"]}, "public.t: 2 rows; masked, not the source's values: c"),
        (
            {"large": ["d"]},
            "public.t: 2 rows; large values are cut or references, as shaping.large_values says: d",
        ),
    ],
)
def test_columns_that_are_not_the_sources_are_named(
    hidden: dict[str, list[str]], told: str
) -> None:
    changed: dict[str, Any] = {**hidden}
    assert replace(RESTORED, **changed).line() == told


def test_rows_that_a_filter_leaves_out_are_said_to_be_missing() -> None:
    found = replace(RESTORED, filtered=True)
    assert found.line().endswith("; without the source's rows that shaping.filters leaves out")


@pytest.mark.parametrize("dry_run", [False, True])
def test_sequences_are_said_to_stand_where_they_were(*, dry_run: bool) -> None:
    found = Restoration(1, 5, 0, 5, 5, (), dry_run)
    assert any("setval" in line for line in found.lines()) is not dry_run


def test_masks_are_found_by_their_patterns() -> None:
    shaping = ShapingSettings(masks={"public.*": {"card*": MaskSettings(text="x")}})
    naming = Naming("bank", shaping)
    assert naming.masks("public", "t", "card_number")
    assert not naming.masks("public", "t", "id")
    assert not naming.masks("other", "t", "card_number")
