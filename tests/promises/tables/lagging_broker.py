"""A broker whose metadata lags behind: it shows fewer partitions of a topic than there are."""

from collections.abc import Collection

import pytest

from spark_consumers.kafka.reader import TopicOffsets


def lag(monkeypatch: pytest.MonkeyPatch, topic: str) -> list[tuple[int, ...]]:
    """Return a list to put answers in: the partitions of `topic` that are shown, the last first.

    () is the answer of a broker that does not know the topic.
    """
    stale: list[tuple[int, ...]] = []
    original = TopicOffsets._describe

    def describe(offsets: TopicOffsets, topics: Collection[str]) -> dict[str, tuple[int, ...]]:
        found = original(offsets, topics)
        if topic in found and stale:
            found[topic] = stale.pop()
            if not found[topic]:
                offsets._ids.pop(topic, None)
        return found

    monkeypatch.setattr(TopicOffsets, "_describe", describe)
    return stale
