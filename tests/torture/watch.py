"""Watches a run while it is under fire: what no comparison at the end can show.

hidden    records that a read_committed consumer can't see, though the broker answers
memory    of the bridge's process
"""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from tests.torture.checker import Finding

HIDDEN_S_MAX: Final = 30.0
"""Kafka ends a dead producer's transaction at its time-out (here 3 s), and looks every 10 s; the
bridge may be killed several times meanwhile, and the machine be busy.
"""
RSS_MIB_MAX: Final = 160.0
"""It has about 70 in these runs, whose rows are small or 400 kB."""
_EVERY_S: Final = 0.5
_ANSWER_S: Final = 2.0
_PAGE_BYTES: Final = 4096
Partition = tuple[str, int]


class Hidden:
    """How long the same record has been the first that is hidden in each partition. Pure."""

    def __init__(self) -> None:
        self._since: dict[Partition, tuple[int, float]] = {}
        self.longest_s = 0.0
        self.where: Partition | None = None

    def see(self, now: float, stable: dict[Partition, int], ends: dict[Partition, int]) -> None:
        """Take the last stable offset and the end of each partition, as of `now` (seconds)."""
        hiding = {place: at for place, at in stable.items() if at < ends.get(place, at)}
        self._since = {
            place: self._since[place] if self._since.get(place, (-1, 0))[0] == at else (at, now)
            for place, at in hiding.items()
        }
        for place, (_, since) in self._since.items():
            if now - since > self.longest_s:
                self.longest_s, self.where = now - since, place

    def lose_sight(self) -> None:
        """The broker did not answer, or the rig hides records: what is hidden since when is not
        known any more."""
        self._since.clear()


class Watch(threading.Thread):
    """Looks twice a second until `end`."""

    def __init__(
        self,
        servers: str,
        is_ours: Callable[[str], bool],
        pid: Callable[[], int],
        hiding: Callable[[], bool],
    ) -> None:
        """`is_ours` chooses topics by name; `pid` is of the bridge, 0 while there is none.

        `hiding`: whether the rig hides records now; that time is not counted.
        """
        super().__init__(name="watch", daemon=True)
        self._admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        self._is_ours = is_ours
        self._pid = pid
        self._hiding = hiding
        self._ended = threading.Event()
        self._looked = False
        """Whether it came to its end, and not to one by an error of its own."""
        self.hidden = Hidden()
        self.rss_mib_max = 0.0

    def run(self) -> None:
        """The thread's life."""
        while not self._ended.wait(_EVERY_S):
            self.rss_mib_max = max(self.rss_mib_max, _rss_mib(self._pid()))
            try:
                stable = self._offsets(IsolationLevel.READ_COMMITTED)
                ends = self._offsets(IsolationLevel.READ_UNCOMMITTED)
            except (KafkaException, TimeoutError):
                self.hidden.lose_sight()
            else:
                self.hidden.see(time.monotonic(), stable, ends)
                if self._hiding():
                    self.hidden.lose_sight()
        self._looked = True

    def end(self) -> list[Finding]:
        """Stop looking; what was wrong."""
        self._ended.set()
        self.join()
        return [*self._findings()]

    def _findings(self) -> Iterable[Finding]:
        if not self._looked:
            yield Finding("rig", "nobody watched what is hidden, and the memory")
        if self.hidden.longest_s > HIDDEN_S_MAX:
            what = f"{self.hidden.where} hid a record for {self.hidden.longest_s:.0f} s"
            yield Finding("hidden", what)
        if self.rss_mib_max > RSS_MIB_MAX:
            yield Finding("memory", f"the bridge had {self.rss_mib_max:.0f} MiB resident")

    def _offsets(self, isolation: IsolationLevel) -> dict[Partition, int]:
        known = self._admin.list_topics(timeout=_ANSWER_S).topics
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        wanted = {
            TopicPartition(name, partition): latest
            for name, topic in known.items()
            if self._is_ours(name)
            for partition in topic.partitions
        }
        if not wanted:
            return {}
        asked = self._admin.list_offsets(
            wanted,
            isolation_level=isolation,
            request_timeout=_ANSWER_S,
        )
        return {
            (place.topic, place.partition): future.result(_ANSWER_S).offset
            for place, future in asked.items()
        }


def _rss_mib(pid: int) -> float:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0.0
    return int(pages) * _PAGE_BYTES / 2**20
