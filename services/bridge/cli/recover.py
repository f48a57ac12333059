"""`slotbridge recover`: goes on in the same topics after slot, Kafka or database were lost."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import structlog
import typer

from schemas.config_option import AcceptTokens, ConfigFile
from schemas.errors import ExitCode, SettingsError
from schemas.lsn import format_lsn
from schemas.naming import table_matches
from schemas.recovery import RecoveryRecord
from schemas.settings import BridgeSettings, Settings, SourceSettings, load_settings, require
from schemas.snapshot import SnapshotSettings
from services.bridge import failpoints
from services.bridge.progress.errors import DECIDED_BY_OPERATORS
from services.bridge.repair.diagnosis import OPERATION, Diagnosis, diagnose
from services.bridge.repair.repair import Repair
from services.bridge.repair.scope import Scope
from services.bridge.session.settings import with_accepted
from services.bridge.session.stopped_bridge import open_stopped
from services.bridge.source.witness import witness_of
from services.runtime.process import configure_logging, exit_codes
from services.waiter import Waiter

logger = structlog.get_logger(__name__)

_NOTHING: Final = "nothing to recover: the bridge can start as it is"


def recover(
    config: ConfigFile,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print what is wrong and what would be done. Only missing topics of the bridge "
            "are created, as at any start.",
        ),
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(help="`schema.table` that is not compared with its topic; repeatable."),
    ] = None,
    accept: AcceptTokens = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Compare and repair even if the bridge could start as it is."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Answer with the RecoveryRecord on stdout.")
    ] = False,
) -> None:
    """Make the topics equal to the tables again, with a new slot. The bridge must be stopped.

    For a slot that is gone, invalidated or ahead of Kafka, a lost progress topic or table topic, a
    database that was set back, and a failover that lost what Kafka has. It publishes the rows that
    differ, deletes included, in one Kafka transaction (docs/guides/recovery.md).

    Exit codes: 0 the topics are equal to the tables, or nothing was wrong; 1 you said no; 11 a
    bridge still has the slot; others as `slotbridge run`, where a repair does not help.
    """
    configure_logging(json_lines=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(exit_codes())
        settings = with_accepted(_settings(config), accept)
        primary, topics, check = stack.enter_context(open_stopped(settings, OPERATION))
        failpoints.arm()
        slot = require(settings.source, "source").slot
        try:
            diagnosis = diagnose(check, topics, slot)
        finally:
            check.log_tokens()
        if not (diagnosis.reason or force):
            typer.echo(_NOTHING, err=json)
            return
        repair = Repair(settings, primary, topics, check, diagnosis, tuple(without or ()))
        with contextlib.closing(repair):
            for line in _plan(diagnosis, repair.scope, settings, repair.snapshot):
                typer.echo(line, err=True)
            if dry_run:
                return
            if not (yes or typer.confirm("Do it?", err=True)):
                raise SystemExit(int(ExitCode.CHECK_FAILED))
            primary.establish()
            done = repair.run()
        if json:
            typer.echo(done.model_dump_json())
        else:
            for line in _result_lines(done):
                typer.echo(line)


def repair_by_itself(
    settings: Settings,
    source: SourceSettings,
    bridge: BridgeSettings,
    waiter: Waiter,
) -> None:
    """Repair the topics as `slotbridge recover --yes` does, where nobody has to decide anything.

    A divergence, another server, another choice of changes, lost names of hidden tables, and a
    witness sequence that was set back are an operator's. Tables of `snapshot.exclude` are left out.
    `bridge` tells what an operator accepts by now: not what the file accepted for the first
    session. What the waiter's work raises ends the repair. Raise SlotbridgeError for what this does
    not help.
    """
    settings = settings.model_copy(update={"source": source, "bridge": bridge})
    with open_stopped(settings, OPERATION, waiter) as (primary, topics, check):
        diagnosis = diagnose(check, topics, source.slot)
        if diagnosis.reason is None:
            return
        chosen = isinstance(diagnosis.reason, DECIDED_BY_OPERATORS)
        if chosen or diagnosis.reason.exit_code is not ExitCode.WITNESSES_DISAGREE:
            raise diagnosis.reason
        without = [
            f"{schema}.{table}"
            for schema, table in primary.published()
            if any(table_matches(one, schema, table) for one in settings.snapshot.exclude)
        ]
        repair = Repair(settings, primary, topics, check, diagnosis, tuple(without))
        with contextlib.closing(repair):
            scope = repair.scope
            for line in _plan(diagnosis, scope, settings, repair.snapshot):
                logger.info("recover", plan=line)
            logger.warning(
                "what the slot has not sent can't be recovered: single changes of rows, logical "
                "messages and messages of outboxes",
                since=_since(diagnosis),
                tables_not_compared=", ".join(scope.left_out),
            )
            primary.establish()
            done = repair.run()
        for line in _result_lines(done):
            logger.info("recover", done=line)


def _settings(config: Path) -> Settings:
    """Load the settings. Raise SettingsError where topics can't be compared with tables."""
    settings = load_settings(config)
    kafka = require(settings.kafka, "kafka")
    if (kafka.key_format, kafka.value_format, kafka.cloudevents) != ("json", "json", None):
        raise SettingsError(
            "topics are compared with tables only where their records are plain JSON",
            operation=OPERATION,
            hint="kafka.key_format, kafka.value_format or kafka.cloudevents is another format: "
            "start over with a new slot and topic prefix",
        )
    if settings.shaping.flat is not None:
        raise SettingsError(
            "topics are compared with tables only where their records have an envelope",
            operation=OPERATION,
            hint="shaping.flat makes the records flat rows: start over with a new slot and topic "
            "prefix",
        )
    return settings


def _plan(
    diagnosis: Diagnosis, scope: Scope, settings: Settings, snapshot: SnapshotSettings
) -> Iterator[str]:
    """Yield what is printed before the question: the reason, the steps, and what is lost."""
    source, since = require(settings.source, "source"), _since(diagnosis)
    slot, witness = source.slot, witness_of(source.witness, source.slot).name
    reason = diagnosis.reason
    yield f"why the bridge does not start: {reason.message if reason else 'nothing was found'}"
    yield "what is done:"
    yield f"  1. slot {slot} is dropped where it is there, and made anew"
    yield f"  2. {len(scope.compared)} tables, as they are there, are compared with their topics"
    yield "  3. the rows that differ are published, deletes too, in one Kafka transaction"
    yield f"  4. the progress, also in the {source.witness} {witness}, moves to the new slot"
    yield f"what is lost: single changes between {since} and the new slot: Kafka gets what they"
    yield "  amount to; the messages of outboxes and logical messages of that time never come"
    if why := _rows_never_published(settings, snapshot):
        yield f"{why}: rows that Kafka never had are published as well"
    for name, why in scope.left_out.items():
        yield f"not compared: {name}: {why}"


def _since(diagnosis: Diagnosis) -> str:
    """Name the position behind which Kafka has nothing."""
    record = diagnosis.record
    end_lsn = record.position.end_lsn if record else 0
    return format_lsn(end_lsn) if end_lsn else "the events in Kafka"


def _rows_never_published(settings: Settings, snapshot: SnapshotSettings) -> str:
    """Return the settings for which Kafka may lack rows with good reason, "" for none."""
    origin = require(settings.source, "source").origin
    return ", ".join(
        ["snapshot.mode is never"] * (snapshot.mode == "never")
        + ["snapshot.exclude is set"] * bool(snapshot.exclude)
        + ["snapshot.where is set"] * bool(snapshot.where)
        + ["source.origin is none"] * (origin == "none")
    )


def _result_lines(done: RecoveryRecord) -> Iterator[str]:
    """Yield what is printed after the recovery: rows and events of each table."""
    yield f"the topics are equal to the tables as of {format_lsn(done.lsn)}: start the bridge"
    for name, one in sorted(done.tables.items()):
        emptied = "emptied first; " if one.emptied else ""
        yield (
            f"  {name}: {emptied}{one.rows} rows compared; {one.created} created, "
            f"{one.updated} updated, {one.deleted} deleted"
        )
    for name, why in sorted(done.left_out.items()):
        yield f"  {name}: not compared ({why})"
