"""What happens to the servers and the bridge, drawn from a seed. Pure."""

import random
from collections.abc import Iterator
from typing import Final, NamedTuple

from services.bridge.failpoints import FAILPOINTS

_WEIGHTS: Final = {
    "kill": 30,
    "failpoint": 45,
    "freeze": 2,
    "terminate": 5,
    "broker killed": 3,
    "broker paused": 3,
    "primary restarted": 3,
    "standby killed": 2,
    "failover": 5,
}
_AT_FIRST_START: Final = ("slot created", "first record")
_REPEATED: Final = tuple(name for name in FAILPOINTS if name not in _AT_FIRST_START)
DATABASE_AND_BROKER: Final = frozenset(_WEIGHTS) - {"kill", "failpoint", "freeze", "failover"}


class Fault(NamedTuple):
    """`pause_s` before it; `failpoint` as in SLOTBRIDGE_FAILPOINT; `seconds` it lasts."""

    pause_s: float
    name: str
    failpoint: str
    seconds: float


def first_failpoint(seed: int) -> str:
    """What the very first bridge meets: nothing, or one of what only the first start passes."""
    return random.Random(f"first {seed}").choice(["", *(f"{n}:1" for n in _AT_FIRST_START)])


def schedule(seed: int) -> Iterator[Fault]:
    """Faults without end, the same for the same seed."""
    moments = random.Random(f"faults {seed}")
    while True:
        name = moments.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        point = moments.choice(_REPEATED)
        passage = 1 if point in ("owned", "fenced") else moments.randint(1, 6)
        yield Fault(
            moments.uniform(0.1, 1.5), name, f"{point}:{passage}", moments.uniform(0.3, 5.0)
        )
