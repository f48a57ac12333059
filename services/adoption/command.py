"""`slotbridge adopt` and `release`: take slot and topics over from Debezium, and give them back."""

import contextlib
import json as json_module
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from schemas.config_option import CONFIG_OPTION, ConfigFile
from schemas.errors import ExitCode, OperatorNeeded, SettingsError
from schemas.lsn import format_lsn
from schemas.settings import Settings, load_settings, require
from services.adoption.adoption import Adoption, AdoptionPlan
from services.adoption.connect_offsets import ConnectOffsets
from services.adoption.connector import Connector, connector_of
from services.adoption.failpoints import OF_A_RELEASE, OF_AN_ADOPTION
from services.adoption.last_records import OPERATION
from services.adoption.properties import read_properties
from services.adoption.release import Release
from services.adoption.translation import Translation, differences, translate
from services.bridge import failpoints
from services.bridge.cli.app import app
from services.bridge.session.stopped_bridge import open_stopped
from services.runtime.process import configure_logging, exit_codes

__all__ = ["app"]  # the command `slotbridge`, with the two commands of this module

_UNJUDGED = (
    "not judged: whether Kafka has all that Debezium has confirmed: Kafka Connect has no offset of "
    "the connector"
)
ConnectorFile = Annotated[
    Path,
    typer.Option(
        help="The connector's configuration: JSON, as GET /connectors/NAME answers, or properties."
    ),
]
WorkerFile = Annotated[
    Path | None, typer.Option(help="The properties file of the Kafka Connect worker.")
]
IgnoredKeys = Annotated[
    list[str] | None,
    typer.Option("--ignore", help="Key of the connector's configuration to ignore; repeatable."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be done; change nothing.")
]
Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON document on stdout.")]


@app.command()
def adopt(
    from_debezium: ConnectorFile,
    worker: WorkerFile = None,
    config: Annotated[Path | None, CONFIG_OPTION] = None,
    write: Annotated[
        Path | None,
        typer.Option(help="Translate the connector's configuration into this new file, and end."),
    ] = None,
    ignore: IgnoredKeys = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    publish_lacking: Annotated[
        bool,
        typer.Option(
            "--publish-lacking",
            help="Publish events that Kafka lacks although Debezium's offset covers them.",
        ),
    ] = False,
    clock_margin_s: Annotated[
        int,
        typer.Option(min=1, help="Seconds by which the clocks of database and Kafka may differ."),
    ] = 60,
    json: Json = False,
) -> None:
    """Continue in the topics of a Debezium connector that was stopped and deleted.

    First run it with --write FILE: it translates the connector's configuration into settings. Then
    run it with --config FILE: it publishes the changes that the slot decodes again and that Kafka
    lacks, in one Kafka transaction with the first progress record (docs/guides/adopt.md).

    Exit codes: 0 done; 1 you said no, or Debezium has written meanwhile; 2 the configuration has no
    counterpart; 11 Debezium still has the slot; others as `slotbridge run`.
    """
    configure_logging(json_lines=False)
    with exit_codes():
        connector, translation = _read(from_debezium, worker, ignore)
        if write is not None:
            _write(write, translation, json=json)
            return
        settings = _settings(config)
        _require_alike(translation, settings)
        with contextlib.ExitStack() as stack:
            primary, topics, check = stack.enter_context(open_stopped(settings, OPERATION))
            failpoints.arm(OF_AN_ADOPTION + OF_A_RELEASE)
            offset = ConnectOffsets(require(settings.kafka, "kafka"), connector).read().offset
            margin_ms = clock_margin_s * 1000
            adoption = Adoption(settings, primary, topics, check, connector, offset, margin_ms)
            stack.callback(adoption.close)
            if not dry_run:
                adoption.fence()
            plan = adoption.plan()
            late: list[str] = []
            if offset is None:
                typer.echo(_UNJUDGED, err=True)
            if not json:
                for line in _plan_lines(plan):
                    typer.echo(line, err=True)
            if plan.lacking and not publish_lacking:
                raise _lacking(plan)
            if not dry_run:
                if not (yes or typer.confirm("Do it?", err=True)):
                    raise SystemExit(int(ExitCode.CHECK_FAILED))
                primary.establish()
                late = adoption.run(plan)
        if json:
            typer.echo(json_module.dumps({"dry_run": dry_run, **_document(plan), "late": late}))
        _require_none_late(late)
        if not (dry_run or json):
            typer.echo("adopted: start the bridge; never start the connector again")


def _settings(config: Path | None) -> Settings:
    """Load the settings. Raise SettingsError where no file is named."""
    if config is None:
        raise SettingsError(
            "neither --write nor --config is given",
            operation=OPERATION,
            hint="first --write slotbridge.yaml, then --config slotbridge.yaml",
        )
    settings = load_settings(config)
    if settings.shaping.claims:
        raise SettingsError(
            "Debezium's topics have large values, shaping.large_values stores them elsewhere",
            operation=OPERATION,
            hint="adopt without claim_check_bytes, then add it and start the bridge",
        )
    _require_placed_by_key(settings, OPERATION)
    return settings


def _require_placed_by_key(settings: Settings, operation: str) -> None:
    """Raise SettingsError where rows are in other partitions than Debezium puts them."""
    if settings.shaping.partition_by:
        raise SettingsError(
            "Debezium places rows by their keys, shaping.partition_by by other columns",
            operation=operation,
            hint="adopt and release without shaping.partition_by "
            "(docs/guides/shaping.md, Placement)",
        )


def _require_none_late(late: list[str]) -> None:
    """End with exit code 1 where Debezium has written records since the topics were read."""
    if late:
        typer.echo(
            f"adopted, but Debezium wrote {len(late)} records meanwhile, which are there twice: "
            f"{', '.join(late[:5])}. Hint: its process is alive: end it",
            err=True,
        )
        raise SystemExit(int(ExitCode.CHECK_FAILED))


@app.command()
def release(
    config: ConfigFile,
    to_debezium: ConnectorFile,
    worker: WorkerFile = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Give slot and topics back to a Debezium connector. The bridge must be stopped.

    It writes the offset from which the connector goes on, and removes the bridge's progress.

    Exit codes: 0 done; 1 you said no; 11 a bridge still has the slot; 30 the slot can't be given
    back.
    """
    configure_logging(json_lines=False)
    with exit_codes():
        connector, _ = _read(to_debezium, worker, None)
        settings = load_settings(config)
        _require_placed_by_key(settings, "release")
        kafka, slot = require(settings.kafka, "kafka"), require(settings.source, "source").slot
        if (connector.prefix, connector.slot) != (kafka.topic_prefix, slot):
            raise SettingsError(
                f"the connector has prefix {connector.prefix} and slot {connector.slot}, the "
                f"settings {kafka.topic_prefix} and {slot}",
                operation="release",
                hint="name the connector that the topics are given back to",
            )
        if kafka.key_format != "json" or not connector.has_plain_keys:
            raise SettingsError(
                f"kafka.key_format is {kafka.key_format}, and the connector writes keys "
                f"{'as JSON' if connector.has_plain_keys else 'with schemas'}: its rows would go "
                "on under other keys or in other partitions",
                operation="release",
                hint="only keys that are JSON without schemas stay in place: "
                "key.converter.schemas.enable=false with JsonConverter, and kafka.key_format json",
            )
        with open_stopped(settings, OPERATION) as (primary, topics, check):
            failpoints.arm(OF_AN_ADOPTION + OF_A_RELEASE)
            offsets = ConnectOffsets(kafka, connector)
            giving = Release(settings, primary, topics, check, offsets)
            lsn = giving.plan()
            typer.echo(f"connector {connector.name} goes on at {format_lsn(lsn)}", err=True)
            typer.echo(f"its offset is written to {offsets.where}: no worker may run", err=True)
            if not dry_run:
                if not (yes or typer.confirm("Do it?", err=True)):
                    raise SystemExit(int(ExitCode.CHECK_FAILED))
                primary.establish()
                lsn = giving.run()
        if json:
            typer.echo(json_module.dumps({"dry_run": dry_run, "lsn": lsn, "offset": offsets.where}))


def _read(
    file: Path, worker: Path | None, ignored: list[str] | None
) -> tuple[Connector, Translation]:
    """Read the connector over its worker's properties. Raise SettingsError."""
    properties = read_properties(_text(worker)) if worker is not None else {}
    text = _text(file)
    try:
        document: Any = (
            json_module.loads(text) if text.lstrip().startswith("{") else read_properties(text)
        )
        connector = connector_of(document, properties)
    except ValueError as error:
        raise SettingsError(
            f"{file}: {error}",
            operation=OPERATION,
            hint="save what GET /connectors/NAME of Kafka Connect's REST interface answers",
        ) from None
    return connector, translate(connector, ignored=ignored or ())


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"can't read {file}: {error}", operation=OPERATION) from None


def _write(file: Path, translation: Translation, *, json: bool) -> None:
    """Write the translated settings into a new file. Raise SettingsError where it exists."""
    _require_translated(translation)
    try:
        with file.open("x", encoding="utf-8") as new:
            file.chmod(0o600)
            new.write(yaml.safe_dump(translation.settings, sort_keys=False))
    except OSError as error:
        raise SettingsError(
            f"can't write {file}: {error.strerror}",
            operation=OPERATION,
            hint="name a file that does not exist, in a folder that does",
        ) from None
    if json:
        typer.echo(json_module.dumps({"written": str(file), "notes": translation.notes}))
        return
    for note in translation.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{file}: complete it, then slotbridge check-config --config {file}")


def _require_translated(translation: Translation) -> None:
    if translation.refusals:
        raise SettingsError(
            f"the connector can't be taken over as it is: {'; '.join(translation.refusals)}",
            operation=OPERATION,
            hint="--ignore KEY leaves a key out that makes no difference to the topics",
        )


def _require_alike(translation: Translation, settings: Settings) -> None:
    """Raise SettingsError where the settings would publish something else than the connector."""
    _require_translated(translation)
    given: Mapping[str, Any] = settings.model_dump()
    if found := [*differences(translation.settings, given)]:
        raise SettingsError(
            f"the settings are not the connector's: {'; '.join(found)}",
            operation=OPERATION,
            hint="take them from --write; change them later, once the bridge runs",
        )


def _plan_lines(plan: AdoptionPlan) -> Iterator[str]:
    """Yield what `adopt` prints before it changes anything."""
    yield f"slot decodes from {format_lsn(plan.slot_lsn)} on; seen to {format_lsn(plan.wal_lsn)}"
    yield f"Kafka has changes up to {format_lsn(plan.end_lsn)}, of {plan.overlap} transactions"
    for topic in sorted({*plan.records_read, *plan.published}):
        yield (
            f"  {topic}: {plan.records_read[topic]} records read, {plan.left_out[topic]} of the "
            f"changes are there, {plan.published[topic]} are published now"
        )
    if not plan.failover:
        yield "the slot becomes a failover slot"
    yield f"the bridge goes on at {format_lsn(plan.end_lsn)}"


def _document(plan: AdoptionPlan) -> dict[str, Any]:
    return {
        "slot_lsn": plan.slot_lsn,
        "end_lsn": plan.end_lsn,
        "transactions": plan.overlap,
        "records_read": dict(plan.records_read),
        "left_out": dict(plan.left_out),
        "published": dict(plan.published),
        "lacking": dict(plan.lacking),
        "failover": plan.failover,
    }


def _lacking(plan: AdoptionPlan) -> OperatorNeeded:
    counts = ", ".join(f"{count} of {topic}" for topic, count in sorted(plan.lacking.items()))
    return OperatorNeeded(
        f"Kafka lacks events that Debezium's offset says it has: {counts}",
        operation=OPERATION,
        hint="the settings publish more than the connector did (a filter, a transformation), or "
        "Debezium has lost them: compare; --publish-lacking publishes them now",
    )
