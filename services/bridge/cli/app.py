"""The command `slotbridge`: run, status, tail, teardown, demo; other modules have the rest."""

import contextlib
import json as json_module
from functools import partial
from pathlib import Path
from typing import Annotated

import structlog
import typer

from schemas.config_option import AcceptTokens, ConfigFile
from schemas.errors import ExitCode, SettingsError
from schemas.settings import load_settings, require
from schemas.version import print_version
from services.bridge import compiled, failpoints, metrics
from services.bridge.cli.init import init
from services.bridge.cli.preflight import preflight
from services.bridge.cli.publication import publication
from services.bridge.cli.recover import recover, repair_by_itself
from services.bridge.cli.setup import check_config, docs, examples, schema, sql
from services.bridge.cli.snapshot import snapshot
from services.bridge.session.runner import Runner
from services.bridge.session.settings import SessionSettings, with_accepted
from services.runtime.access import read_token
from services.runtime.process import Probes, configure_logging, exit_codes, stop_on_signals
from services.runtime.tracing import open_spans

logger = structlog.get_logger(__name__)
app = typer.Typer(
    help="PostgreSQL changes to Kafka, exactly once, through crashes and failover.",
    no_args_is_help=True,
    add_completion=False,
)
JsonLogs = Annotated[bool, typer.Option("--json", help="Write the log as JSON lines.")]
for command in (
    *(init, check_config, preflight, publication, recover),
    *(schema, sql, docs, examples),
):
    app.command()(command)
app.add_typer(snapshot, name="snapshot")


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Accept options before the subcommand."""


@app.command()
def run(config: ConfigFile, json: JsonLogs = False, accept: AcceptTokens = None) -> None:
    """Stream changes into Kafka until SIGTERM. Restarting is always safe.

    Exit codes: 0 stopped cleanly; 2 settings; 10-19 try again; 20-29 a server, privilege or
    resource needs an operator; 30-39 positions disagree; 40-49 a message or record is refused.
    """
    configure_logging(json_lines=json)
    with exit_codes(), contextlib.ExitStack() as stack:
        failpoints.arm()
        settings = with_accepted(load_settings(config), accept)
        source = require(settings.source, "source")
        kafka = require(settings.kafka, "kafka")
        stop = stop_on_signals()
        metrics.set_build(compiled=compiled.engine is not None)
        spans = open_spans(settings.tracing, "slotbridge", metrics.SPANS)
        if spans is not None:
            stack.callback(spans.close)
        session_settings = SessionSettings(
            source=source,
            kafka=kafka,
            bridge=settings.bridge,
            shaping=settings.shaping,
            snapshot=settings.snapshot,
            streaming=settings.bridge.streaming,
            spans=spans,
            claim_check=settings.claim_check,
        )
        mend = settings.snapshot.mode == "when_needed"
        repair = partial(repair_by_itself, settings) if mend else None
        runner = Runner(session_settings, stop, settings.registry, repair)
        if settings.bridge.http_port is not None:
            from services.bridge.session.control import SECTION, Control  # only with HTTP

            bridge = settings.bridge
            token = read_token(bridge.token, bridge.token_file, section=SECTION)
            probes = Probes(
                settings.bridge.http_host,
                settings.bridge.http_port,
                healthy=runner.healthy,
                ready=runner.ready,
                waiting_for=runner.waiting_for,
                available=runner.available,
                routes=Control(runner, source, token).routes(),
            )
            stack.enter_context(probes)
            logger.info("serving", url=f"http://{settings.bridge.http_host}:{probes.port}/metrics")
        runner.run()


@app.command()
def status(
    config: ConfigFile,
    json: Annotated[
        bool, typer.Option("--json", help="Answer with one JSON document on stdout.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C.")] = False,
    every_s: Annotated[
        float, typer.Option(min=0.5, help="With --watch: seconds between two reports.")
    ] = 2.0,
) -> None:
    """Show the positions of bridge, slots and Kafka, and undecided prepared transactions.

    --watch repeats that on one screen; with --json, one document a line.
    Exit codes: 0 changes flow; 1 they do not: no bridge streams, a server or Kafka does not answer,
    commits are withheld, or a partition has no leader; 2 settings.
    """
    from rich.console import Console

    from services.bridge.cli.status import print_status
    from services.bridge.status.observation import read_status

    configure_logging(json_lines=False)
    with exit_codes():
        settings = load_settings(config)
        source, kafka = require(settings.source, "source"), require(settings.kafka, "kafka")
        stop = stop_on_signals() if watch else None
        console = Console(highlight=False, soft_wrap=True)
        while True:
            found = read_status(source, kafka, settings.shaping)
            if json:
                typer.echo(json_module.dumps(found.as_json()))
            else:
                if watch:
                    console.clear()
                print_status(console, found)
            if stop is None or stop.wait(every_s):
                break
        if found.obstacles:
            raise SystemExit(int(ExitCode.CHECK_FAILED))


@app.command()
def tail(
    config: ConfigFile,
    topic: Annotated[
        list[str] | None,
        typer.Option(help="Full name of a topic to read; repeatable. Default: all of the prefix."),
    ] = None,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="Begin with the first record, not at the end.")
    ] = False,
    count: Annotated[int, typer.Option(min=0, help="End after this many records; 0: never.")] = 0,
    idle_s: Annotated[
        float, typer.Option(min=0, help="End after this many seconds without a record; 0: never.")
    ] = 0,
) -> None:
    """Print committed events as JSON lines, until Ctrl-C. Changes nothing, commits no offsets.

    Avro, Protobuf and JSON Schema are decoded by the registry of the settings.

    Exit codes: 0 ended as asked, or by Ctrl-C; 1 `--idle-s` passed before `--count` records came.
    """
    from services.bridge.cli.tail import tail as records
    from services.kafka.schema_registry import SchemaRegistry

    configure_logging(json_lines=False)
    with exit_codes():
        settings = load_settings(config)
        kafka = require(settings.kafka, "kafka")
        registry = None if settings.registry is None else SchemaRegistry(settings.registry)
        stop, printed = stop_on_signals(), 0

        def is_over(so_far: int, quiet_s: float) -> bool:
            done = bool(count) and so_far >= count
            return stop.is_set() or done or (bool(idle_s) and quiet_s > idle_s)

        for record in records(
            kafka, registry, topics=topic or (), from_beginning=from_beginning, is_over=is_over
        ):
            typer.echo(json_module.dumps(record, ensure_ascii=False))
            printed += 1
        if printed < count and not stop.is_set():
            raise SystemExit(int(ExitCode.CHECK_FAILED))


@app.command()
def teardown(
    config: ConfigFile,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed; change nothing.")
    ] = False,
    publication: Annotated[
        bool, typer.Option("--publication", help="Also drop the publication.")
    ] = False,
    topics: Annotated[
        bool,
        typer.Option("--topics", help="Also delete the topics of the prefix, with their events."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Answer with one JSON document on stdout.")
    ] = False,
) -> None:
    """Remove slot and origin for good, by options publication and topics. Stop the bridge first.

    Exit codes: 0 all of it is removed; 1 you said no; 11 a bridge still has the slot.
    """
    from services.bridge.cli.teardown import removals

    configure_logging(json_lines=False)
    with exit_codes():
        settings = load_settings(config)
        source, kafka = require(settings.source, "source"), require(settings.kafka, "kafka")
        connection, planned = removals(
            source, kafka, settings.shaping, publication=publication, topics=topics
        )
        with connection:
            for one in planned:
                typer.echo(f"remove {one.kind} {one.name}", err=json)
            if not (dry_run or yes or not planned or typer.confirm("Remove all of it?", err=True)):
                raise SystemExit(int(ExitCode.CHECK_FAILED))
            for one in () if dry_run else planned:
                one.remove()
                typer.echo(f"removed {one.kind} {one.name}", err=json)
        if json:
            gone = [{"kind": one.kind, "name": one.name} for one in planned]
            typer.echo(json_module.dumps({"dry_run": dry_run, "removed": gone}))
        elif not planned:
            typer.echo("nothing of it is there")


@app.command()
def demo(
    folder: Annotated[
        Path, typer.Option(help="Folder for the data of the demo's servers; wiped at every start.")
    ] = Path(".cache/demo"),
    scale: Annotated[int, typer.Option(min=1, help="Scale of pgbench: 100,000 accounts each.")] = 1,
    clients: Annotated[int, typer.Option(min=1, help="Number of pgbench clients.")] = 4,
    seconds: Annotated[
        int, typer.Option(min=2, help="Seconds of load before the kill; half as many after it.")
    ] = 20,
    plant: Annotated[
        list[str] | None,
        typer.Option(hidden=True, help="Damage Kafka's copy on purpose: loss or duplicate."),
    ] = None,
) -> None:
    """Run everything on this machine, kill the primary under load, fail over, and compare.

    It ends with one JSON line on stdout. Exit codes: 0 database, subscriber, Kafka and Iceberg
    agree; 1 they do not; others as in docs/reference/exit-codes.md.
    """
    from services.demo.demonstration import Options, run_demonstration
    from services.demo.plant import FAULTS

    configure_logging(json_lines=False)
    with exit_codes():
        faults = [fault for fault in FAULTS if fault in (plant or ())]
        if len(faults) != len(plant or ()):
            raise SettingsError(f"--plant {plant} is not known", operation="read options")
        outcome = run_demonstration(Options(folder, scale, clients, seconds, tuple(faults)))
        typer.echo(json_module.dumps(outcome.figures))
        if not outcome.agreed:
            raise SystemExit(int(ExitCode.CHECK_FAILED))
