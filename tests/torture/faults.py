"""What happens to the servers and the bridge, drawn from a seed. Pure."""

import random
from collections.abc import Iterator
from typing import Final, NamedTuple

from services.bridge.failpoints import FAILPOINTS, OF_A_SNAPSHOT

_WEIGHTS: Final = {
    "kill": 10,
    "failpoint": 26,
    "crash loop": 26,
    "sigterm": 4,
    "freeze": 2,
    "rival": 3,
    "terminate": 6,
    "network cut": 5,
    "network stalled": 3,
    "broker killed": 4,
    "broker paused": 5,
    "broker cut off": 4,
    "broker far away": 3,
    "publication altered": 3,
    "tables locked": 3,
    "primary restarted": 6,
    "standby killed": 4,
    "failover": 10,
    "volume restored": 5,
    "stray bridge": 4,
    "records lost": 3,
    "markers lost": 5,
    "slot lost": 4,
}
_CLUSTER_WEIGHTS: Final = {
    "leader killed": 8,
    "leader killed inside": 8,
    "brokers rolled": 4,
    "disk lost": 6,
}
"""Only where there are several brokers. `inside`: the bridge has a Kafka transaction open."""
_OFTEN: Final = {"kill": 2, "failpoint": 5, "crash loop": 3}
OF_THE_BRIDGE: Final = frozenset({"kill", "failpoint", "crash loop", "sigterm", "freeze", "rival"})
DATABASE_AND_BROKER: Final = frozenset(_WEIGHTS | _CLUSTER_WEIGHTS) - OF_THE_BRIDGE - {"failover"}
VARIANTS: Final = (
    *("old primary revived", "stale bridge", "same timeline twice", "timeline only met"),
    *("volume overtakes", "volume just behind", "volume just overtaken", "written on since"),
)
"""What is drawn within a failover, a restored volume or a loss, and counted like a fault."""
AT_FIRST_START: Final = ("slot created", "first record")
AT_DIVERGENCE: Final = "divergence sent"
"""Not met here: synchronized_standby_slots is set (promises/bridge/faults/test_divergence.py)."""
AT_SETTLING: Final = ("noted", "settling", "settled")
"""Met only where markers were lost, which arms them itself."""
AT_STOP: Final = ("stopping", "closing")
AT_START: Final = ("owned", "topics ready", "fenced", "agreed", "started", "staging loaded")
INSIDE: Final = ("between parts:1", "resumed inside:1", "skipped:1")
"""A crash in the middle of a large transaction, and of its resumption, twice."""
_ONCE: Final = frozenset({*AT_START, "resumed inside"})
_STREAMING: Final = tuple(
    name
    for name in FAILPOINTS + OF_A_SNAPSHOT
    if name not in (*AT_FIRST_START, *AT_SETTLING, *AT_STOP, AT_DIVERGENCE)
)
_CRASHES_MAX: Final = 7


class Fault(NamedTuple):
    """`pause_s` before it; `points` as in SLOTBRIDGE_FAILPOINT; `seconds` it lasts.

    `kill_loop`: the bridge is killed meanwhile, again and again. `revived`: after a failover the
    old primary comes back alone, as a primary.
    """

    pause_s: float
    name: str
    points: tuple[str, ...]
    seconds: float
    kill_loop: bool
    revived: bool


def first_failpoint(seed: int) -> str:
    """What the very first bridge meets: nothing, or one of what only the first start passes."""
    choices = ["", "topic made:1", "topic made:4", *(f"{n}:1" for n in AT_FIRST_START)]
    return random.Random(f"first {seed}").choice(choices)


def faults_with(brokers: int) -> tuple[str, ...]:
    """Names of the faults that are drawn where there are so many brokers."""
    return tuple(_weights(brokers))


def schedule(seed: int, brokers: int = 1) -> Iterator[Fault]:
    """Faults without end, the same for the same seed."""
    moments = random.Random(f"faults {seed}")
    weights = _weights(brokers)
    while True:
        name = moments.choices(list(weights), list(weights.values()))[0]
        yield _drawn(name, moments)


def shuffled_schedule(seed: int, brokers: int = 1) -> Iterator[Fault]:
    """The same, but every fault comes before any has come much more often: for short runs."""
    moments = random.Random(f"deck {seed}")
    names = [name for name in faults_with(brokers) for _ in range(_OFTEN.get(name, 1))]
    while True:
        moments.shuffle(names)
        for name in names:
            fault = _drawn(name, moments)
            yield fault._replace(revived=True, kill_loop=False) if name == "failover" else fault


def only(faults: Iterator[Fault], names: str) -> Iterator[Fault]:
    """Those named in `names`, by commas; all where it is empty. Raises ValueError for another."""
    wanted = set(filter(None, names.split(",")))
    known = tuple(_WEIGHTS | _CLUSTER_WEIGHTS)
    if unknown := wanted - set(known):
        raise ValueError(f"no fault {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return (fault for fault in faults if not wanted or fault.name in wanted)


def _weights(brokers: int) -> dict[str, int]:
    return _WEIGHTS | (_CLUSTER_WEIGHTS if brokers > 1 else {})


def _drawn(name: str, moments: random.Random) -> Fault:
    crashes = moments.randint(2, _CRASHES_MAX) if name == "crash loop" else 1
    points = tuple(_point(moments) for _ in range(crashes))
    if name == "crash loop" and moments.random() < 0.3:
        points = (*INSIDE, *points[:2])
    if name == "sigterm":
        points = (f"{moments.choice(AT_STOP)}:1",)
    return Fault(
        pause_s=moments.uniform(0.0, 1.0),
        name=name,
        points=points,
        seconds=moments.uniform(0.3, 4.0),
        kill_loop=moments.random() < 0.5,
        revived=moments.random() < 0.25,
    )


def _point(moments: random.Random) -> str:
    name = moments.choice(_STREAMING)
    return f"{name}:{1 if name in _ONCE else moments.choice([1, 1, 1, 2, 3, 5])}"
