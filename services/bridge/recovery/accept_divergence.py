"""Goes on from a divergence: an operator accepts that Kafka has what the database lost.

One Kafka transaction says so in `<prefix>.divergence`, removes the staging of prepared transactions
that were lost, and moves the progress back to the switch point, on the new timeline. Nothing that
was published is taken back.
"""

import time
from collections.abc import Mapping

import structlog

from schemas.acceptance import Acceptance
from schemas.events import DivergenceRecord, divergence_topic, prepared_topic
from schemas.lsn import format_lsn
from schemas.progress import ProgressRecord
from services.bridge.events.event import Event
from services.bridge.failpoints import reach
from services.bridge.progress.consistency import set_back
from services.bridge.progress.errors import Diverged
from services.bridge.recovery.staged_transactions import load_staged
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.bridge.source.database import Primary
from services.bridge.transactions.staging import tombstones

logger = structlog.get_logger(__name__)


def accept(
    error: Diverged,
    record: ProgressRecord | None,
    accepted: Acceptance,
    primary: Primary,
    switch_points: Mapping[int, int],
    producer: TransactionalProducer,
    topics: Topics,
) -> ProgressRecord:
    """Return the progress record from which to go on, now in Kafka.

    Raise `error` where no operator accepts it, and where the server's history does not tell where
    it left the timeline of the record.
    """
    taken = accepted.takes(error.token)
    if not taken or error.switch_lsn is None or error.beyond is None or record is None:
        raise error
    now_ms = time.time_ns() // 1_000_000
    logger.warning(
        "divergence accepted: continuing on the new timeline",
        slot=error.slot,
        lost_timeline=error.timeline,
        timeline=error.server_timeline,
        switch_lsn=format_lsn(error.switch_lsn),
        reached_lsn=format_lsn(error.reached_lsn),
        transactions=error.beyond.count,
        reason=error.message,
    )
    lost = DivergenceRecord(
        slot=error.slot,
        system_identifier=record.server.system_identifier,
        lost_timeline=error.timeline,
        timeline=error.server_timeline,
        switch_lsn=error.switch_lsn,
        reached_lsn=error.reached_lsn,
        count=error.beyond.count,
        transactions=list(error.beyond.listed),
        ts_ms=now_ms,
    )
    value = lost.model_dump_json().encode()
    producer.send(
        [
            Event(topics.prepare_late(divergence_topic), error.slot.encode(), value),
            *lost_staging(topics, error.slot, error.switch_lsn),
        ]
    )
    reach("divergence sent")
    history = {"timeline": primary.server.timeline, "history": dict(switch_points)}
    server = record.server.model_copy(update=history)
    back = set_back(record, error.switch_lsn).model_copy(update={"server": server, "ts_ms": now_ms})
    producer.commit(back)
    return back


def lost_staging(topics: Topics, slot: str, switch_lsn: int) -> list[Event]:
    """Return tombstones of transactions prepared at `switch_lsn` or later: none gets decided."""
    topic = prepared_topic(topics.prefix)
    with topics.reader(topic) as reader:
        staged = load_staged(reader, slot)
    lost = [record for record in staged if record.prepare_lsn >= switch_lsn]
    if lost:
        gids = ", ".join(sorted(record.gid for record in lost)[:5])
        logger.warning("prepared transactions are lost", count=len(lost), gids=gids)
    return [event for record in lost for event in tombstones(topic, record, switch_lsn)]
