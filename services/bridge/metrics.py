"""What the bridge counts, under the names that dashboards and alerts use."""

from prometheus_client import Counter, Gauge, Histogram

EVENTS = Counter("slotbridge_events_total", "Events in committed Kafka transactions.")
EVENT_BYTES = Counter("slotbridge_event_bytes_total", "Their keys and values, with overhead.")
TRANSACTIONS = Counter("slotbridge_transactions_total", "Source transactions that Kafka has.")
DROPPED = Counter("slotbridge_dropped_events_total", "Events decoded again that Kafka already had.")
DEAD_LETTERS = Counter(
    "slotbridge_dead_letters_total", "Records that Kafka refused, committed to <prefix>.dead."
)
RECONNECTS = Counter("slotbridge_reconnects_total", "Sessions after the first.")
COMMIT_SECONDS = Histogram(
    "slotbridge_kafka_commit_seconds",
    "Time to commit a Kafka transaction.",
    buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
RECEIVED_LSN = Gauge("slotbridge_received_lsn_bytes", "WAL position that the server has sent.")
DURABLE_LSN = Gauge("slotbridge_durable_lsn_bytes", "WAL position that Kafka has.")
ORIGIN_LSN = Gauge("slotbridge_origin_lsn_bytes", "WAL position in the replication origin.")
TIMELINE = Gauge("slotbridge_timeline", "Timeline of the connected server.")
STREAMING = Gauge("slotbridge_streaming", "1 while connected and streaming.")
STANDBYS_AWAITED = Gauge(
    "slotbridge_standbys_awaited", "Listed standbys for which the server withholds commits."
)
