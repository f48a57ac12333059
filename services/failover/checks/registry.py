"""Every check by name, in the order in which to repair what they find. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.failover.checks import (
    capacity,
    consumers,
    identity,
    lag,
    leftovers,
    machines,
    pair,
    promotion,
    retention,
    slots,
    standby,
    standby_slots,
    upstream,
)

if TYPE_CHECKING:
    from schemas.findings import Finding
    from services.failover.checks.facts import Facts
    from services.failover.checks.model import Check

CHECKS: tuple[Check, ...] = (
    pair.primary_answers,
    pair.primary_fenced,
    pair.node_answers,
    pair.server_version,
    standby.standby_answers,
    upstream.cascading_standby,
    standby.wal_level,
    upstream.primary_slot_name,
    upstream.primary_slot,
    upstream.standby_cut_off,
    upstream.standby_streams,
    lag.standby_lag,
    standby.hot_standby_feedback,
    upstream.primary_conninfo_dbname,
    upstream.primary_conninfo_password,
    upstream.pg_hba,
    standby.sync_replication_slots,
    standby.failover_slots_extension,
    standby.slot_capacity,
    standby.replay,
    standby.databases,
    standby.slotsync_worker,
    *slots.GATE,
    slots.slot_skipped,
    retention.slot_wal,
    retention.slot_reserves_wal,
    retention.slot_without_failover,
    leftovers.leftover_slot,
    retention.slot_two_phase,
    standby_slots.standby_slot_listed,
    standby_slots.listed_slot_missing,
    standby_slots.listed_slot_logical,
    standby_slots.listed_slot_invalidated,
    standby_slots.listed_slot_inactive,
    standby_slots.commits_wait,
    standby_slots.standby_list_stale,
    standby_slots.synchronous_names_stale,
    standby_slots.synchronous_before,
    consumers.subscriber_answers,
    consumers.subscription_enabled,
    consumers.subscription_changeable,
    consumers.subscription_worker,
    consumers.initial_copy,
    consumers.slot_shared,
    consumers.bridge_connected,
    consumers.kafka_record,
    identity.primary_timeline,
    identity.timeline_history,
    identity.subscription_identified,
    identity.managed_by,
    promotion.standby_read_only,
    promotion.standby_admits_consumers,
    capacity.recovery_settings,
    capacity.promotion_capacity,
    machines.fence_command,
    machines.stop_command,
    promotion.fence_overrides,
    promotion.alter_system_allowed,
    promotion.rewind_possible,
    promotion.archiving,
    promotion.idle_slot_timeout,
    promotion.subscriptions_elsewhere,
    pair.other_standbys,
)

SETTINGS = (
    "allow_alter_system",
    "archive_command",
    "archive_library",
    "archive_mode",
    "cluster_name",
    "data_checksums",
    "hot_standby_feedback",
    "idle_replication_slot_timeout",
    *capacity.RECOVERY_SETTINGS,
    "max_replication_slots",
    "max_slot_wal_keep_size",
    "primary_slot_name",
    "recovery_min_apply_delay",
    "shared_preload_libraries",
    "sync_replication_slots",
    "synchronized_standby_slots",
    "synchronous_standby_names",
    "wal_level",
    "wal_log_hints",
)
"""The settings to read from every node."""


def run_checks(facts: Facts) -> tuple[Finding, ...]:
    """Run all checks; return at least one finding of each that applies."""
    return tuple(finding for check in CHECKS for finding in check.findings(facts))
