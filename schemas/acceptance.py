"""The token by which an operator accepts one refusal, and nothing else. Pure.

    KIND:SUBJECT:BOUND        what is accepted, of which object, up to where

A refusal that an operator may accept prints its token; `--accept TOKEN`, or `bridge.accept` in the
settings, takes it. A token of another server, another position or another refusal takes nothing:
whoever takes none is refused as before, and a token that nothing asks for is logged.
"""

import hashlib
from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from schemas.lsn import format_lsn, parse_lsn

_PLAIN: Final = "/@+-._"
"""Characters of a subject or bound that no shell and no YAML reads as anything else."""
_DIGEST_DIGITS: Final = 12


class Kind(StrEnum):
    """The refusals that a token can accept."""

    DIVERGENCE = "divergence"  # Kafka has changes that the database lost
    UNSENT_CHANGES = "unsent-changes"  # another publication: changes from before it never come
    LOST_RECORDS = "lost-records"  # Kafka has lost committed records
    LOST_NAMES = "lost-names"  # Kafka has lost names of tables of which settings hide something
    ABORTED_RECORDS = "aborted-records"  # Kafka has aborted records that it had decided to commit
    OTHER_STORAGE = "other-storage"  # the object storage is not the one to which events refer
    OTHER_DATABASE = "other-database"  # for a repair: the database is another cluster than before
    LOST_SLOT = "lost-slot"  # the new primary lacks a slot, or a part of what its consumer needs
    LOST_WAL = "lost-wal"  # the new primary lacks known WAL of the old one
    UNKNOWN_WAL = "unknown-wal"  # nobody knows whether the new primary has all commits
    IS_OFF = "is-off"  # a node that gives no answer is off, and not only cut off
    NOT_PROMOTED = "not-promoted"  # a node was not promoted, though a run may have ordered that


_OF_WAL: Final = frozenset({Kind.LOST_WAL, Kind.UNKNOWN_WAL})


class Token(NamedTuple):
    """The name of one refusal."""

    kind: Kind
    subject: str
    bound: str

    @classmethod
    def parse(cls, text: str) -> "Token":
        """Return the token that `text` writes. Raise ValueError for anything else."""
        parts = text.split(":")
        if len(parts) != len(cls._fields) or parts[0] not in {*Kind}:
            raise ValueError(f"{text!r} is not a token: copy it from the refusal that prints it")
        return cls(Kind(parts[0]), unquote(parts[1]), unquote(parts[2]))

    def __str__(self) -> str:
        """Return KIND:SUBJECT:BOUND, to be copied into a shell or a file."""
        return f"{self.kind}:{quote(self.subject, _PLAIN)}:{quote(self.bound, _PLAIN)}"

    @property
    def offer(self) -> str:
        """The end of a hint of the bridge: how to accept this refusal."""
        recovers = self.kind is Kind.OTHER_DATABASE
        command = "slotbridge recover" if recovers else "slotbridge run"
        settings = "" if recovers else " (or bridge.accept in the settings)"
        return f"or accept this, and nothing else: {command} {options([self])}{settings}"

    def covers(self, refused: "Token") -> bool:
        """Tell whether this token accepts the refusal that prints `refused`.

        It does so where both are equal. Of WAL it accepts less as well: a new primary that has more
        by now, and fewer bytes.
        """
        if self == refused or self.kind not in _OF_WAL:
            return self == refused
        given, wanted = _lsn_and_bytes(self.bound), _lsn_and_bytes(refused.bound)
        if self[:2] != refused[:2] or given is None or wanted is None:
            return False
        return given[0] <= wanted[0] and wanted[1] <= given[1]


def of_bytes(lsn: int, count: int) -> str:
    """Return the bound of lost WAL: the new primary has its WAL up to `lsn`, and lacks `count`."""
    return f"{format_lsn(lsn)}+{count}"


def _lsn_and_bytes(bound: str) -> tuple[int, int] | None:
    lsn, _, count = bound.partition("+")
    try:
        return parse_lsn(lsn), int(count)
    except ValueError:
        return None


def options(tokens: Iterable[Token]) -> str:
    """Return the options that accept the refusals of all `tokens`."""
    return " ".join(dict.fromkeys(f"--accept {token}" for token in tokens))


def short_digest(lines: Iterable[str]) -> str:
    """Return a short digest of `lines` in any order, for a bound of many parts."""
    text = "\n".join(sorted(lines))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]


class Acceptance:
    """The tokens that an operator gives to one start or command, and which of them were used."""

    def __init__(self, tokens: Iterable[Token] = ()) -> None:
        self.tokens = frozenset(tokens)
        self.used: set[Token] = set()

    def takes(self, refused: Token | None) -> bool:
        """Tell whether a token covers this refusal; note that it was used. None: nothing does."""
        covering = {token for token in self.tokens if refused and token.covers(refused)}
        self.used |= covering
        return bool(covering)

    def only(self, *kinds: Kind) -> "Acceptance":
        """Return the part with tokens of these kinds; what it uses is used here as well."""
        part = Acceptance(token for token in self.tokens if token.kind in kinds)
        part.used = self.used
        return part

    @property
    def unused(self) -> tuple[str, ...]:
        """The tokens that nothing has asked for."""
        return tuple(sorted(map(str, self.tokens - self.used)))


class Everything(Acceptance):
    """The acceptance of a repair: it makes the topics right whatever they have lost."""

    def takes(self, refused: Token | None) -> bool:
        """Return true: a repair accepts any refusal."""
        return True
