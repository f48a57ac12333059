"""The server of snapshot.conninfo, against the primary. Pure."""

from collections.abc import Iterator

from schemas.findings import Finding, Severity
from services.bridge.preflight.facts import Facts, SnapshotStandby
from services.bridge.preflight.finding import advice, alter


def snapshot_standby(facts: Facts) -> Iterator[Finding]:
    """Yield findings about the standby that a snapshot reads rows from."""
    standby = facts.standby
    if standby is None:
        return
    if not standby.same_database:
        yield advice(
            "snapshot-standby-foreign",
            Severity.CRITICAL,
            standby.host,
            "another system identifier or database than that of source.conninfo",
            "the bridge ends with exit code 31 before it reads a row",
            "name a standby of the primary in snapshot.conninfo, and its database",
        )
    elif not standby.recovers:
        yield advice(
            "snapshot-standby-promoted",
            Severity.WARNING,
            standby.host,
            "it is not in recovery",
            "rows of a snapshot are read from the primary",
            "name a standby in snapshot.conninfo, or remove the setting",
        )
    else:
        yield from _serving(standby)


def _serving(standby: SnapshotStandby) -> Iterator[Finding]:
    """Yield findings about a standby of the primary."""
    if standby.waits:
        yield advice(
            "snapshot-standby-waits",
            Severity.WARNING,
            standby.host,
            standby.waits,
            "the snapshot waits for it, without a time limit; changes flow",
            "let it stream and replay what the primary writes, or name another standby",
        )
    if standby.hidden:
        yield advice(
            "snapshot-standby-hidden",
            Severity.CRITICAL,
            standby.host,
            "the role can't see which timeline the standby replays (pg_stat_wal_receiver)",
            "the bridge ends with exit code 20 before it reads a row",
            "on the primary: GRANT pg_read_all_stats TO the role of snapshot.conninfo, or run "
            "sql/roles.sql with -v snapshot=ROLE",
        )
    if standby.denied:
        yield advice(
            "snapshot-standby-denied",
            Severity.CRITICAL,
            standby.host,
            f"the role may not read {', '.join(standby.denied)}",
            "the bridge ends with exit code 20 before it reads such a table",
            "on the primary: GRANT SELECT on these tables to the role of snapshot.conninfo, or run "
            "sql/roles.sql with -v snapshot=ROLE",
        )
    if not standby.feedback:
        yield advice(
            "snapshot-standby-cancels",
            Severity.NOTE,
            standby.host,
            "hot_standby_feedback = off",
            "VACUUM on the primary may cancel the reading of a chunk, which is then read again",
            f"on the standby: {alter('hot_standby_feedback', 'on')}",
        )
