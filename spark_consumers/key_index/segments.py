"""Where the rows of keys are: sorted segments that never change, searched from the newest on.

A place is a number: the data file's, shifted by POSITION_BITS, and the row's position in the file.
Pure.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_consumers.key_index.keys import Keys, Numbers, joined

POSITION_BITS = 40
FILES_MAX = 1 << (63 - POSITION_BITS)
NOWHERE = -1
Booleans = np.ndarray[Any, np.dtype[np.bool_]]


def places_in(file: int, positions: Numbers) -> Numbers:
    """Return the places of positions in a data file."""
    return (np.int64(file) << POSITION_BITS) | positions.astype(np.int64)


def files_of(places: Numbers) -> Numbers:
    """Return the data file of each place."""
    return places >> POSITION_BITS


def positions_of(places: Numbers) -> Numbers:
    """Return the position of each place in its file."""
    return places & ((1 << POSITION_BITS) - 1)


class Segment(NamedTuple):
    """Keys sorted by their numbers, each with the place of its row."""

    keys: Keys
    places: Numbers

    @classmethod
    def of(cls, keys: Keys, places: Numbers) -> "Segment":
        """Sort keys; of those with the same number the first given stays the first."""
        order = np.argsort(keys.numbers, kind="stable")
        return cls(keys.take(order), places[order])

    def find(self, wanted: Keys) -> Numbers:
        """Return the first place of each wanted key, NOWHERE for a key that is not here."""
        found = np.full(len(wanted.numbers), NOWHERE, np.int64)
        if not len(self.places):
            return found
        numbers, texts = self.keys
        at = np.searchsorted(numbers, wanted.numbers)
        asked = np.arange(len(found))
        while len(asked):
            inside = at < len(numbers)
            asked, at = asked[inside], at[inside]
            same = numbers[at] == wanted.numbers[asked]
            asked, at = asked[same], at[same]
            equal = np.ones(len(asked), bool)
            if texts is not None and wanted.texts is not None:
                there, here = wanted.texts.take(pa.array(asked)), texts.take(pa.array(at))
                equal = np.asarray(pc.equal(there, here), dtype=bool)
            found[asked[equal]] = self.places[at[equal]]
            asked, at = asked[~equal], at[~equal] + 1  # another key of the same number
        return found

    def spans(self, numbers: Numbers) -> Booleans:
        """Tell which numbers are between the segment's first and last one.

        Tables with growing keys have segments of separate ranges: most keys need only one of them.
        """
        own = self.keys.numbers
        if not len(own):
            return np.zeros(len(numbers), bool)
        return np.asarray((own[0] <= numbers) & (numbers <= own[-1]), dtype=bool)

    def has_twice(self) -> bool:
        """Tell whether a key is here more than once."""
        return bool(_repeats(self.keys).any())


def find(wanted: Keys, segments: Sequence[Segment], live: Booleans) -> Numbers:
    """Return the place of each key by its newest segment, NOWHERE where its file is not live."""
    found = np.full(len(wanted.numbers), NOWHERE, np.int64)
    asked = np.arange(len(found))
    for segment in segments:
        if not len(asked):
            break
        near = asked[segment.spans(wanted.numbers[asked])]
        found[near] = segment.find(wanted.take(near))
        asked = asked[found[asked] == NOWHERE]
    there = found != NOWHERE
    found[there] = np.where(live[files_of(found[there])], found[there], NOWHERE)
    return found


def merged(segments: Sequence[Segment], live: Booleans | None = None) -> Segment:
    """Merge segments that follow each other, the newest first; what a newer one has is left out.

    With `live`, so are rows of files that are not live: only where the oldest segment is among
    them, whose older places would come to light again otherwise.
    """
    keys = joined([segment.keys for segment in segments])
    places = np.concatenate([segment.places for segment in segments])
    both = Segment.of(keys, places)
    kept = np.flatnonzero(~_repeats(both.keys))
    both = Segment(both.keys.take(kept), both.places[kept])
    if live is None:
        return both
    kept = np.flatnonzero(live[files_of(both.places)])
    return Segment(both.keys.take(kept), both.places[kept])


def _repeats(keys: Keys) -> Booleans:
    """Tell of each sorted key whether an equal one is before it."""
    numbers, texts = keys
    same = np.zeros(len(numbers), bool)
    same[1:] = numbers[1:] == numbers[:-1]
    again = np.flatnonzero(same)
    if texts is None or not len(again):
        return same
    before, here = texts.take(pa.array(again - 1)), texts.take(pa.array(again))
    same[again] = np.asarray(pc.equal(before, here), dtype=bool)
    collided = again[~same[again]]
    if len(collided):  # equal keys may have another one of their number between them
        members = np.flatnonzero(np.isin(numbers, numbers[collided]))
        codes = np.asarray(texts.take(pa.array(members)).dictionary_encode().indices)
        order = np.lexsort((codes, numbers[members]))  # stable
        members, codes = members[order], codes[order]
        same[members] = False
        equal = (numbers[members[1:]] == numbers[members[:-1]]) & (codes[1:] == codes[:-1])
        same[members[1:][equal]] = True
    return same
