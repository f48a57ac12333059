"""The bridge's Prometheus metrics, under the names that dashboards and alerts use."""

from prometheus_client import Counter, Gauge, Histogram

EVENTS = Counter("slotbridge_events_total", "Events published in committed Kafka transactions.")
EVENT_BYTES = Counter(
    "slotbridge_event_bytes_total",
    "Bytes of keys and values of published events, including per-event overhead.",
)
TRANSACTIONS = Counter(
    "slotbridge_transactions_total",
    "Source transactions whose events are in committed Kafka transactions.",
)
DROPPED = Counter(
    "slotbridge_dropped_events_total",
    "Events that the server sent again and that the bridge dropped because Kafka has them.",
)
DEAD_LETTERS = Counter(
    "slotbridge_dead_letters_total",
    "Records that Kafka refused and that were committed to <prefix>.dead instead.",
)
RECONNECTS = Counter(
    "slotbridge_reconnects_total", "Sessions that the bridge has started after its first one."
)
COMMIT_SECONDS = Histogram(
    "slotbridge_kafka_commit_seconds",
    "Seconds to commit a Kafka transaction.",
    buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
RECEIVED_LSN = Gauge(
    "slotbridge_received_lsn_bytes", "WAL position up to which the server has sent changes."
)
DURABLE_LSN = Gauge(
    "slotbridge_durable_lsn_bytes", "WAL position up to which changes are committed in Kafka."
)
ORIGIN_LSN = Gauge(
    "slotbridge_origin_lsn_bytes", "WAL position stored in the bridge's replication origin."
)
TIMELINE = Gauge("slotbridge_timeline", "Timeline of the server that the bridge is connected to.")
STREAMING = Gauge("slotbridge_streaming", "1 while the bridge receives changes, else 0.")
STANDBYS_AWAITED = Gauge(
    "slotbridge_standbys_awaited",
    "Standbys in synchronized_standby_slots for which the server withholds changes.",
)
