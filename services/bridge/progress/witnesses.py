"""All witnesses of what Kafka has, read at start and compared (`agreement`)."""

from schemas.errors import Retryable
from schemas.events import ProgressRecord, transaction_topic
from services.bridge.kafka.topics import Topics
from services.bridge.postgres.connection import ReplicationConnection
from services.bridge.postgres.database import Primary
from services.bridge.progress.agreement import Diverged, Witnesses, check_witnesses
from services.bridge.progress.divergence import transactions_beyond, with_transactions


def compare_witnesses(
    primary: Primary,
    connection: ReplicationConnection,
    record: ProgressRecord | None,
    slot: str,
    topics: Topics,
) -> Witnesses:
    """Return what was seen, where all agree.

    Raises what check_witnesses raises; a divergence names the transactions that are beyond.
    """
    system_identifier, timeline = connection.identify()
    server = primary.server
    if (system_identifier, timeline) != (server.system_identifier, server.timeline):
        raise Retryable("the server changed while connecting", operation="connect")
    seen = Witnesses(
        record,
        primary.slot(),
        primary.origin_lsn(),
        server,
        connection.switch_points(timeline),
    )
    try:
        check_witnesses(seen, slot)
    except Diverged as error:
        if error.switch_lsn is None:
            raise
        with topics.reader(transaction_topic(topics.prefix)) as reader:
            beyond = transactions_beyond(reader, error.switch_lsn)
        raise with_transactions(error, beyond) from error
    return seen
