"""`slotbridge status` for people: one line a host, one a prepared transaction."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from schemas.lsn import format_lsn
from services.bridge.status.observation import HostStatus, Status, Waiting


def print_status(console: Console, status: Status) -> None:
    """Print the report; colour only on a terminal."""
    why = "; ".join(status.obstacles)
    console.print(
        Text.assemble(
            ("NOT OK    " if why else "OK        ", "red" if why else "green"),
            f"slot {status.slot}: ",
            why or "changes flow",
            "" if status.lag_bytes is None else f", Kafka lacks {status.lag_bytes:,} bytes of WAL",
        )
    )
    for line in _lines(status):
        console.print(Text(line))


def _lines(status: Status) -> Iterator[str]:
    """Yield the lines that `slotbridge status` prints."""
    record = status.progress
    if record is not None:
        part = " and a part of the next transaction" if record.position.seq else ""
        end_lsn = format_lsn(record.position.end_lsn)
        yield f"kafka     has all up to {end_lsn}{part}, timeline {record.server.timeline}"
    elif status.kafka_problem:
        yield f"kafka     {status.kafka_problem}"
    else:
        yield "kafka     has no progress record: the bridge has not run yet"
    for partition in status.leaderless:
        yield f"waiting   no session starts before this partition has a leader: {partition}"
    for host in status.hosts:
        yield f"{host.role or 'host':<9} {host.host}: {_host(host)}"
        for one in host.drift:
            yield f"differs   {one.subject}: {one.evidence}: {one.change}"
        for standby in host.withheld_by:
            yield f"waiting   no commits are sent before this standby has them: {standby}"
    for waiting in status.waiting:
        yield f"prepared  {waiting.gid!r}: {_waiting(waiting)}"


def _host(host: HostStatus) -> str:
    """Return one line about a server: its problem, or its slot, timeline and positions."""
    if host.problem is not None:
        return host.problem
    parts = [_slot(host)]
    if host.role == "primary":  # a standby hides its timeline from roles without pg_monitor
        parts.insert(0, f"timeline {host.timeline}")
    if host.wal_lsn is not None:
        parts.append(f"WAL at {format_lsn(host.wal_lsn)}")
    if host.origin_lsn is not None:
        parts.append(f"{host.witness} at {format_lsn(host.origin_lsn)}")
    return ", ".join(parts)


def _slot(host: HostStatus) -> str:
    """Return words about the slot on a server: its position, and whether it survives a failover."""
    slot = host.slot
    if slot is None:
        return "no slot"
    if slot.invalidation_reason is not None:
        return f"the slot is invalidated ({slot.invalidation_reason})"
    confirmed = slot.confirmed_flush_lsn
    at = f" at {format_lsn(confirmed)}" if confirmed is not None else ""
    if host.role == "standby":
        return f"slot{at} {'ready' if slot.ready else 'not ready'} for a failover"
    kind = "" if slot.failover else " (no failover slot: it will not survive a promotion)"
    return f"slot confirmed{at}{kind}"


def _waiting(waiting: Waiting) -> str:
    where = {
        True: "prepared in the database",
        False: "not prepared in the database: decided but not read yet, or lost at a failover",
        None: "no primary to ask",
    }[waiting.in_database]
    return f"{waiting.changes:,} changes, {_age(waiting.age_s)} old, {where}"


def _age(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
