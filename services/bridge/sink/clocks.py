"""Whether the clocks of the bridge, PostgreSQL and Kafka agree, where it matters. Pure.

Records of a topic with message.timestamp.type=CreateTime have the time of the bridge's clock: too
far ahead of the broker's (message.timestamp.after.max.ms, an hour) Kafka refuses them; behind it by
more than the topic's retention, it deletes them as soon as it looks. In topics with LogAppendTime,
as the bridge makes them, only the times inside of events are wrong.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from schemas.errors import SetupError
from services.bridge.sink.topic_requirements import Topic, command, named

WARN_MS: Final = 60_000
REFUSE_MS: Final = 3_600_000


class Clocks(NamedTuple):
    """Three clocks that were read together, in ms since 1970.

    `appended_ms`: when Kafka last appended a record of this bridge, by the broker's clock, which
    has at least reached that time; None where it is not known.
    """

    bridge_ms: int
    server_ms: int
    appended_ms: int | None

    @property
    def behind_ms(self) -> int:
        """How far the bridge's clock is behind the later one of the others'; negative: ahead."""
        return max(self.server_ms, self.appended_ms or 0) - self.bridge_ms


def check_clocks(clocks: Clocks, topics: Iterable[Topic], servers: str) -> str:
    """Return a warning that the clocks differ, "" if they agree.

    Raise SetupError where Kafka would refuse, or soon delete, what the bridge writes.
    """
    behind_ms = clocks.behind_ms
    if abs(behind_ms) < WARN_MS:
        return ""
    side = "behind" if behind_ms > 0 else "ahead of"
    difference = f"this machine's clock is {abs(behind_ms) // 1000} s {side} that of " + (
        "Kafka" if (clocks.appended_ms or 0) > clocks.server_ms else "PostgreSQL"
    )
    stamped = [topic.name for topic in topics if topic.stamped_by_clients]
    if abs(behind_ms) < REFUSE_MS or not stamped:
        return difference
    raise SetupError(
        f"{difference}, and Kafka keeps or refuses the records of {named(stamped)} by that time",
        operation="compare clocks",
        subject=f"topic {stamped[0]}",
        hint="correct the clock (NTP), or let Kafka stamp the records of each of these topics: "
        + command(servers, stamped[0], "message.timestamp.type=LogAppendTime"),
    )
