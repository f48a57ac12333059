"""GET /v1/wait, which the bridge and `slottables run` answer: its query, and which LSNs are lost.

lsn=0/1A2B3C     wait for what was committed before
in=kafka|tables  where: each program answers for its own
timeline=2       the timeline that the LSN was read on; optional
timeout_s=30     0 to WAIT_MAX_S; more is as WAIT_MAX_S

Pure.
"""

import math
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, cast, get_args

from schemas.lsn import format_lsn, parse_lsn

Where = Literal["kafka", "tables"]
WAIT_MAX_S: Final = 300.0
WAITERS_MAX: Final = 64
"""How many requests may wait at a time; each of the others is told to come again."""
TOO_MANY: Final = f"{WAITERS_MAX} requests wait already: ask again later"
_DEFAULT_S: Final = "30"
_PARAMETERS: Final = ("lsn", "in", "timeline", "timeout_s")
_ELSEWHERE: Final[Mapping[Where, str]] = {
    "kafka": "in=kafka is answered by the bridge: ask at bridge.http_port",
    "tables": "in=tables is answered by slottables run: ask at tables.http_port",
}
_TIMELINES: Final = 2**32


class WaitQuery(NamedTuple):
    """A request to wait until all that was committed before `lsn` is there.

    `timeline`: that on which the LSN was read, None where the caller does not say.
    """

    lsn: int
    timeline: int | None
    timeout_s: float


def parse_wait(parameters: Mapping[str, str], here: Where) -> WaitQuery:
    """Return the request of a query string. Raise ValueError, which names the wrong parameter."""
    unknown = sorted(set(parameters) - set(_PARAMETERS))
    if unknown:
        raise ValueError(f"{unknown[0]} is unknown: the parameters are {', '.join(_PARAMETERS)}")
    where = parameters.get("in", here)
    if where not in get_args(Where):
        raise ValueError(f"in is {where!r}: it must be kafka or tables")
    if where != here:
        raise ValueError(_ELSEWHERE[cast("Where", where)])
    try:
        lsn = parse_lsn(parameters["lsn"])
    except (KeyError, ValueError):
        raise ValueError("lsn is not a position such as 0/1A2B3C") from None
    return WaitQuery(lsn, _timeline(parameters), _timeout_s(parameters))


def lost(query: WaitQuery, timeline: int, history: Mapping[int, int]) -> str:
    """Return why what was committed before the LSN may not be in the present history, "" if it is.

    `timeline`: the present one; `history`: each of its ancestors -> the LSN at which it was left.
    A timeline that is newer than the present one is not judged: it is present once the program has
    followed.
    """
    if query.timeline is None or query.timeline >= timeline:
        return ""
    left = history.get(query.timeline)
    if left is None:
        return (
            f"timeline {query.timeline} is not an ancestor of timeline {timeline}, which is the "
            "present one"
        )
    if query.lsn > left:
        return (
            f"timeline {query.timeline} was left at {format_lsn(left)}: what was committed between "
            f"that and {format_lsn(query.lsn)} is lost, the present timeline is {timeline}"
        )
    return ""


def _timeline(parameters: Mapping[str, str]) -> int | None:
    """Return the timeline that the query names, None for none. Raise ValueError for no number."""
    text = parameters.get("timeline")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) < _TIMELINES:
        raise ValueError("timeline is not a number such as 2")
    return int(text)


def _timeout_s(parameters: Mapping[str, str]) -> float:
    """Return the seconds to wait, at most WAIT_MAX_S. Raise ValueError for no number."""
    try:
        found = float(parameters.get("timeout_s", _DEFAULT_S))
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or found < 0:
        raise ValueError("timeout_s is not a number of seconds such as 30")
    return min(found, WAIT_MAX_S)
