"""Which of two tables has a topic that would be of both."""

import pytest

from schemas.errors import OperatorNeeded
from schemas.naming import Naming
from schemas.shaping import ShapingSettings
from services.bridge.events.topic_owners import TopicOwners

NAMING = Naming("bank", ShapingSettings())
FORMER, TABLE = ("public", "order items"), ("public", "order_items")


def test_a_topic_passes_on_once_its_owner_is_gone() -> None:
    """Renamed or dropped: the schema topic still has it."""
    topic = NAMING.table(*TABLE)
    owners = TopicOwners(NAMING, [FORMER])
    with pytest.raises(OperatorNeeded, match="would share its topic with"):
        owners.claim(TABLE, topic, lambda _owner: False)
    owners.claim(TABLE, topic, lambda owner: owner == FORMER)
    owners.claim(TABLE, topic)
    with pytest.raises(OperatorNeeded):
        owners.claim(FORMER, topic, lambda _owner: False)
    TopicOwners(NAMING, [FORMER, TABLE]).claim(TABLE, topic)
