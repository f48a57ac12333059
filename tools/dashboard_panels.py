"""What the three Grafana dashboards show: a table of panels each.

A panel: title, unit (Grafana's name), and what is asked by the legend of each line. `$window`
becomes Grafana's $__rate_interval; `{}` gets the filter by namespace (tools.dashboards).
"""

from typing import Final, NamedTuple


class Panel(NamedTuple):
    """One panel; `asked`: legend -> PromQL."""

    title: str
    unit: str
    asked: dict[str, str]
    kind: str = "timeseries"


def quantiles(metric: str) -> dict[str, str]:
    """Return the queries for the median, p95 and p99 of a histogram."""
    rates = f"sum by (le) (rate({metric}_bucket{{}}[$window]))"
    return {
        name: f"histogram_quantile({share}, {rates})"
        for name, share in (("median", 0.5), ("p95", 0.95), ("p99", 0.99))
    }


def rate(metric: str, by: str = "") -> str:
    """Return the rate of a counter, summed, or by a label."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{}}[$window]))"


BRIDGE: Final = (
    Panel("Bridges that stream", "none", {"": "sum(slotbridge_streaming{})"}, "stat"),
    Panel("Delivery age", "s", {"": "min(slotbridge_delivery_age_seconds{})"}, "stat"),
    Panel("Standbys awaited", "none", {"": "max(slotbridge_standbys_awaited{})"}, "stat"),
    Panel(
        "Version",
        "none",
        {"{{version}}": "count by (version) (slotbridge_build_info{})"},
        "stat",
    ),
    Panel("Lag: commit in PostgreSQL to commit in Kafka", "s", quantiles("slotbridge_lag_seconds")),
    Panel(
        "Rows by operation", "rowsps", {"{{operation}}": rate("slotbridge_rows_total", "operation")}
    ),
    Panel(
        "Rows by table, the ten busiest",
        "rowsps",
        {"{{table}}": f"topk(10, {rate('slotbridge_rows_total', 'table')})"},
    ),
    Panel(
        "Bytes by table, the ten largest",
        "Bps",
        {"{{table}}": f"topk(10, {rate('slotbridge_row_bytes_total', 'table')})"},
    ),
    Panel(
        "Transactions and events",
        "ops",
        {
            "transactions": rate("slotbridge_transactions_total"),
            "events": rate("slotbridge_events_total"),
        },
    ),
    Panel("Commit of a Kafka transaction", "s", quantiles("slotbridge_kafka_commit_seconds")),
    Panel(
        "Kafka transaction, first event to commit",
        "s",
        quantiles("slotbridge_kafka_transaction_seconds"),
    ),
    Panel(
        "WAL that Kafka lacks",
        "bytes",
        {"": "max(slotbridge_received_lsn_bytes{} - slotbridge_durable_lsn_bytes{})"},
    ),
    Panel(
        "WAL delivered",
        "Bps",
        {"": "max(deriv(slotbridge_durable_lsn_bytes{}[$window]))"},
    ),
    Panel(
        "WAL that the slot keeps on the primary",
        "bytes",
        {
            "kept for {{slot}}": "max by (slot) (slotbridge_slot_retained_bytes{})",
            "left for {{slot}}": "max by (slot) (slotbridge_slot_safe_wal_bytes{})",
        },
    ),
    Panel(
        "State of the slot",
        "none",
        {
            "{{status}}": "max by (status) (slotbridge_slot_wal_status{})",
            "invalidated": "sum(slotbridge_slot_invalidated{})",
            "active": "max(slotbridge_slot_active{})",
            "failover": "max(slotbridge_slot_failover{})",
        },
    ),
    Panel(
        "Decoding on the server (logical_decoding_work_mem)",
        "Bps",
        {
            "decoded": rate("slotbridge_slot_decoded_bytes_total"),
            "spilled to disk": rate("slotbridge_slot_spilled_bytes_total"),
            "streamed in blocks": rate("slotbridge_slot_streamed_bytes_total"),
        },
    ),
    Panel(
        "Spills and streams",
        "ops",
        {
            "spills": rate("slotbridge_slot_spills_total"),
            "blocks": rate("slotbridge_slot_streams_total"),
            "transactions spilled": rate("slotbridge_slot_spilled_transactions_total"),
            "transactions streamed": rate("slotbridge_slot_streamed_transactions_total"),
            "transactions decoded": rate("slotbridge_slot_decoded_transactions_total"),
        },
    ),
    Panel(
        "Transactions that wait in the bridge",
        "none",
        {
            "in progress": "sum(slotbridge_open_transactions{})",
            "prepared": "sum(slotbridge_prepared_transactions{})",
            "partly on disk": "sum(slotbridge_spooled_transactions{})",
        },
    ),
    Panel(
        "Bytes that wait in the bridge",
        "bytes",
        {
            "in progress": "sum(slotbridge_open_bytes{})",
            "prepared": "sum(slotbridge_prepared_bytes{})",
            "on disk": "sum(slotbridge_spooled_bytes{})",
        },
    ),
    Panel(
        "Sessions begun again, duplicates dropped, records refused",
        "none",
        {
            "reconnects": "sum(increase(slotbridge_reconnects_total{}[$window]))",
            "dropped": "sum(increase(slotbridge_dropped_events_total{}[$window]))",
            "dead letters": "sum(increase(slotbridge_dead_letters_total{}[$window]))",
        },
    ),
    Panel(
        "Positions",
        "bytes",
        {
            "received": "max(slotbridge_received_lsn_bytes{})",
            "in Kafka": "max(slotbridge_durable_lsn_bytes{})",
            "origin": "max(slotbridge_origin_lsn_bytes{})",
        },
    ),
)
FAILOVER: Final = (
    Panel(
        "Nodes that take writes",
        "none",
        {"": "sum(max by (server) (slotfailover_primary{}))"},
        "stat",
    ),
    Panel(
        "Slots that are not ready",
        "none",
        {"": "sum(1 - min by (slot) (slotfailover_slot_ready{}))"},
        "stat",
    ),
    Panel(
        "Critical findings",
        "none",
        {"": 'sum(max by (check) (slotfailover_problems{severity="critical"}))'},
        "stat",
    ),
    Panel(
        "Unfinished run",
        "s",
        {"{{command}}": "max by (command) (slotfailover_unfinished_run_age_seconds{})"},
        "stat",
    ),
    Panel("Servers that answer", "none", {"{{server}}": "max by (server) (slotfailover_up{})"}),
    Panel(
        "Since the last answer",
        "s",
        {"{{server}}": "time() - max by (server) (slotfailover_last_contact_timestamp_seconds{})"},
    ),
    Panel(
        "Who takes writes",
        "none",
        {
            "{{server}}": "max by (server) (slotfailover_primary{})",
            "fenced {{server}}": "max by (server) (slotfailover_fenced{})",
        },
    ),
    Panel("Timeline", "none", {"{{server}}": "max by (server) (slotfailover_timeline{})"}),
    Panel(
        "Standby lag", "s", {"{{server}}": "max by (server) (slotfailover_standby_lag_seconds{})"}
    ),
    Panel(
        "WAL that standbys and consumers lack",
        "bytes",
        {"{{consumer}}": "max by (consumer) (slotfailover_lag_bytes{})"},
    ),
    Panel(
        "Slots ready for a failover",
        "none",
        {"{{slot}} on {{standby}}": "min by (slot, standby) (slotfailover_slot_ready{})"},
    ),
    Panel(
        "Consumers ahead of the standby",
        "bytes",
        {"{{consumer}}": "max by (consumer) (slotfailover_consumer_ahead_bytes{})"},
    ),
    Panel(
        "Since a slot's copy was synchronized",
        "s",
        {"{{slot}}": "max by (slot) (slotfailover_slot_sync_age_seconds{})"},
    ),
    Panel(
        "WAL kept for slots",
        "bytes",
        {"{{server}} {{slot}}": "max by (server, slot) (slotfailover_slot_retained_bytes{})"},
    ),
    Panel(
        "WAL left for slots",
        "bytes",
        {"{{server}} {{slot}}": "min by (server, slot) (slotfailover_slot_safe_wal_bytes{})"},
    ),
    Panel(
        "Slots lost or at risk",
        "none",
        {
            "{{status}}": "sum by (status) (slotfailover_slot_wal_status{})",
            "invalidated": "sum(slotfailover_slot_invalidated{})",
        },
    ),
    Panel(
        "Slots in use",
        "none",
        {"{{server}} {{slot}}": "max by (server, slot) (slotfailover_slot_active{})"},
    ),
    Panel(
        "Findings by check",
        "none",
        {"{{check}} ({{severity}})": "max by (check, severity) (slotfailover_problems{})"},
    ),
    Panel(
        "Observations",
        "s",
        {
            "took": "max(slotfailover_observation_seconds{})",
            "age": "time() - max(slotfailover_last_observation_timestamp_seconds{})",
        },
    ),
    Panel(
        "Replicas",
        "none",
        {
            "leads": "sum(slotfailover_leader{})",
            "paused": "max(slotfailover_paused{})",
            "judged": "max(slotfailover_judged{})",
            "steps that a repoint would run": "max(slotfailover_pending_steps{})",
            "subscriptions held": "max(slotfailover_subscriptions_held{})",
        },
    ),
    Panel(
        "The commands' lock", "none", {"{{holder}}": "max by (holder) (slotfailover_lock_held{})"}
    ),
    Panel(
        "Steps of the last run",
        "s",
        {"{{step}}": "max by (step) (slotfailover_last_run_step_seconds{})"},
        "bargauge",
    ),
    Panel(
        "Last run",
        "s",
        {"{{command}} took": "max by (command) (slotfailover_last_run_seconds{})"},
        "stat",
    ),
    Panel("Last drill", "s", {"age": "min(slotfailover_last_drill_age_seconds{})"}, "stat"),
    Panel(
        "Promotions and repoints",
        "none",
        {
            "promotions": "max(slotfailover_promotions_total{})",
            "repoints": "sum(slotfailover_repoints_total{})",
            "failed": "sum(slotfailover_repoint_failures_total{})",
        },
    ),
)
TABLES: Final = (
    Panel("Lag of the tables", "s", {"": "max(slottables_lag_seconds{})"}, "stat"),
    Panel("WAL that the tables lack", "bytes", {"": "max(slottables_lag_bytes{})"}, "stat"),
    Panel("Last epoch", "none", {"": "max(slottables_epoch{})"}, "stat"),
    Panel(
        "Version", "none", {"{{version}}": "count by (version) (slottables_build_info{})"}, "stat"
    ),
    Panel("Duration of an epoch", "s", quantiles("slottables_epoch_seconds")),
    Panel("Epochs", "ops", {"": rate("slottables_epoch_seconds_count")}),
    Panel(
        "Rows and events",
        "ops",
        {
            "rows written": rate("slottables_rows_total"),
            "events applied": rate("slottables_events_total"),
            "transactions": rate("slottables_transactions_total"),
        },
    ),
    Panel(
        "Events that are not in a table",
        "none",
        {
            "quarantined": "sum(increase(slottables_quarantined_total{}[$window]))",
            "dead letters": "sum(increase(slottables_dead_letters_total{}[$window]))",
            "duplicates skipped": "sum(increase(slottables_duplicates_total{}[$window]))",
        },
    ),
    Panel("Commit LSN of the tables", "bytes", {"": "max(slottables_commit_lsn{})"}),
    Panel(
        "WAL by which tables are behind the others",
        "bytes",
        {
            "{{table}}": "topk(10, scalar(max(slottables_commit_lsn{}))"
            " - max by (table) (slottables_table_commit_lsn{}))"
        },
    ),
    Panel(
        "Duration of the last epoch by table",
        "s",
        {"{{table}}": "topk(10, max by (table) (slottables_table_epoch_seconds{}))"},
    ),
)
