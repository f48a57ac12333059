"""What a run's topics lack, repeat or tear, judged by the rows alone. Pure.

Every change of a transaction carries a token of its own, "TID/NUMBER", in the row that it writes;
the ledger says how many tokens each committed transaction has. So a contender's format, positions
and transaction metadata do not matter: a consumer that reads committed records sees each token
once, or it does not.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Seen(NamedTuple):
    """One event, in its partition's order; `key` and `version` of a row of `account`, else None."""

    token: str
    key: int | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Counts of one run, or their sums."""

    transactions: int = 0
    events: int = 0
    """That the database has committed."""
    lost: int = 0
    """Events that Kafka does not show."""
    repeated: int = 0
    """Events that Kafka shows again."""
    torn: int = 0
    """Transactions of which Kafka shows a part for good."""
    phantoms: int = 0
    """Events of transactions that the database does not have."""
    went_back: int = 0
    """Events of a key with an older version than one before them."""
    wrong_rows: int = 0
    """Keys whose last event is not what the database has."""

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        faults = (self.lost, self.repeated, self.torn, self.phantoms)
        return not any((*faults, self.went_back, self.wrong_rows))

    def __add__(self, other: "Verdict") -> "Verdict":
        pairs = zip(_values(self), _values(other), strict=True)
        return Verdict(*(ours + theirs for ours, theirs in pairs))


def _values(verdict: Verdict) -> list[int]:
    return [getattr(verdict, name) for name in Verdict.__dataclass_fields__]


def judge(
    ledger: Mapping[str, int], versions: Mapping[int, int], events: Iterable[Seen]
) -> Verdict:
    """Compare `events` with the database.

    `ledger`: transaction id -> its number of changes, besides the row of the ledger itself, whose
    token is "TID/0". `versions`: account -> its version now.
    """
    counts: Counter[str] = Counter()
    last: dict[int, int] = {}
    went_back = 0
    for event in events:
        counts[event.token] += 1
        if event.key is not None and event.version is not None:
            went_back += event.version < last.get(event.key, 0)
            last[event.key] = event.version
    lost = torn = 0
    for tid, changes in ledger.items():
        missing = sum(not counts[f"{tid}/{number}"] for number in range(changes + 1))
        lost += missing
        torn += 0 < missing <= changes
    known = {token for token in counts if token.rpartition("/")[0] in ledger}
    return Verdict(
        transactions=len(ledger),
        events=sum(ledger.values()) + len(ledger),
        lost=lost,
        repeated=sum(counts[token] - 1 for token in known if counts[token]),
        torn=torn,
        phantoms=sum(count for token, count in counts.items() if token not in known),
        went_back=went_back,
        wrong_rows=sum(last.get(key, 0) != version for key, version in versions.items()),
    )
