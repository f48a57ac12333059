"""Remarks of plans: a run plans often, and reports each remark once, in its last form. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Measured(str):
    """A remark with a figure or a cause that changes from one plan to the next.

    `about` names the subject: of two remarks about one subject, only the later one is kept.
    """

    __slots__ = ("about",)
    about: str

    def __new__(cls, text: str, about: str) -> Measured:
        """Make a remark that reads as `text`."""
        note = super().__new__(cls, text)
        note.about = about
        return note


def merge(earlier: Iterable[str], later: Iterable[str]) -> tuple[str, ...]:
    """Return all remarks in the order in which they came up, each in its last form."""
    found: dict[str, str] = {}
    for note in (*earlier, *later):
        found[note.about if isinstance(note, Measured) else note] = note
    return tuple(found.values())
