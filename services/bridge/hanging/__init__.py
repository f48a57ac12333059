"""Ends transactions that Kafka has decided and left open. One door: `settle_all`.

The room exists for a defect of brokers, KAFKA-20734: a coordinator of Kafka 4.3.0 to 4.4.0
skips the markers of partitions that have no leader when it writes them. What is not marked
hides for ever, from readers of committed records, all that follows it.

    settle      what hangs is committed or aborted, as it was decided      (transactions, decision)
    note        before a commit: a kill makes Kafka abort what hangs       (notes)
    publish     the records that such a kill has lost, once more           (republish)
    again       until there is no note: what was published may hang, too

A release of Kafka that writes these markers removes the room, once the bridge refuses older
brokers. With it go the second producer (`sink/producer_pair`), the waits for markers
(`sink/markers`), SettlingNote and SETTLED_KEY.
"""

from functools import partial

from services.bridge.hanging.notes import read_notes
from services.bridge.hanging.republish import StartJudge, publish_lost
from services.bridge.hanging.transactions import require_none_hanging, settle
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.bridge.source.database import Primary


def settle_all(
    topics: Topics,
    producer: TransactionalProducer,
    primary: Primary,
    slot: str,
    judge: StartJudge,
) -> None:
    """End all hanging transactions of this bridge; publish records again that this has lost.

    `producer` has begun its session. From now on it does not write to partitions where one of its
    transactions hangs. Raise as `settle`; OperatorNeeded where lost records can't be published.
    """
    producer.markers.look = partial(require_none_hanging, topics, slot)
    while True:
        settle(topics, producer, primary, slot, judge)
        notes = read_notes(topics, slot)
        if not notes:
            return
        publish_lost(topics, producer, slot, notes, judge)
