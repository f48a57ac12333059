"""The command `slottables`: brings the bridge's events into Iceberg tables, and compares them."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schemas.config_option import ConfigFile
from schemas.errors import ExitCode, SlotbridgeError
from schemas.settings import Settings, load_settings, require
from schemas.version import print_version
from spark_consumers.epochs.report import EpochReport
from spark_consumers.terminal import (
    Json,
    exit_codes,
    interval_seconds,
    read_lsn,
    readable,
    stop_on_signals,
    write_line,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_consumers.operations import Operator

app = typer.Typer(
    help="Iceberg tables that follow PostgreSQL tables, from the bridge's Kafka topics.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Accept options before the subcommand."""


@app.command()
def run(
    config: ConfigFile,
    as_json: Json = False,
    until_idle: Annotated[
        float | None,
        typer.Option(min=0.1, help="Stop once nothing has arrived for this many seconds."),
    ] = None,
    once: Annotated[
        bool,
        typer.Option("--once", help="Stop once the tables have what Kafka had at the start."),
    ] = False,
) -> None:
    """Keep the Iceberg tables up to date with the topics, until SIGTERM or Ctrl-C.

    Exit codes: 0 stopped cleanly; 30 with --once or --until-idle also where a table is parked;
    others as in docs/reference/exit-codes.md.
    """
    with exit_codes(as_json=as_json):
        from spark_consumers.audit.schedule import scheduled
        from spark_consumers.epochs import job
        from spark_consumers.kafka.reader import require_broker

        settings = load_settings(config)
        kafka, stop = readable(settings), stop_on_signals()
        require_broker(kafka)
        with _session(settings) as spark, scheduled(spark, settings):
            job.run_epochs(
                spark,
                settings,
                report=_print_json if as_json else _print_line,
                stop=stop,
                until_idle_s=until_idle,
                once=once,
            )


@app.command()
def verify(
    config: ConfigFile,
    as_json: Json = False,
    table: Annotated[
        list[str] | None, typer.Option(help="Source table as schema.table. Repeatable.")
    ] = None,
    examples: Annotated[
        bool, typer.Option("--examples", help="Show up to 5 keys of rows that differ.")
    ] = False,
    as_of: Annotated[
        str,
        typer.Option(
            help="Compare the tables as of the last epoch up to this LSN with Kafka's events."
        ),
    ] = "",
) -> None:
    """Compare each table with its source at rest, or as of an LSN with Kafka's events.

    Exit codes: 0 all rows are equal; 1 some differ, or a table or the source was not judged; 19
    not a single table was judged.
    """
    with exit_codes(as_json=as_json):
        from spark_consumers.verify.as_of import verify_as_of
        from spark_consumers.verify.comparison import verified, verify_lines, verify_tables

        settings = load_settings(config)
        with _session(settings) as spark:
            names, shown = tuple(table or ()), 5 if examples else 0
            if as_of:
                found = verify_as_of(
                    spark, settings, read_lsn(as_of), tables=names, examples_max=shown
                )
            else:
                found = verify_tables(spark, settings, tables=names, examples_max=shown)
        code = verified(found)
        for line in verify_lines(found, as_json=as_json):
            write_line(line)
        if code == ExitCode.NOT_JUDGED:
            sys.stderr.write("error: not a single table was judged\n")
        if code != ExitCode.OK:
            raise SystemExit(int(code))


@app.command()
def audit(
    config: ConfigFile,
    table: Annotated[
        list[str] | None, typer.Argument(help="Source tables as schema.table; none: all.")
    ] = None,
    as_json: Json = False,
    repeat: Annotated[
        str, typer.Option(help="Audit again and again, one each interval: 30s, 15m, 1h.")
    ] = "",
) -> None:
    """Compare tables with their source exactly, as of one LSN, while everything goes on.

    `run` must be running. Exit codes: 0 all rows are equal; 1 some differ; 19 none was found to
    differ, but a table was not judged; with --repeat, those of the last audit, also where it
    failed.
    """
    with exit_codes(as_json=as_json):
        from spark_consumers.audit.audit import Audit
        from spark_consumers.audit.report import audit_lines, exit_code
        from spark_consumers.audit.schedule import repeated
        from spark_consumers.restore.bars import bars

        settings, interval_s = load_settings(config), interval_seconds(repeat)
        stop = stop_on_signals()
        names, code = tuple(table or ()), ExitCode.OK
        with _session(settings) as spark, bars() as progress:
            work = Audit(spark, settings, stop=stop, progress=progress)
            for found in repeated(lambda: work.run(names), interval_s, stop):
                if isinstance(found, SlotbridgeError):
                    if not repeat:
                        raise found
                    code = found.exit_code
                    sys.stderr.write(f"error: {found}\n")
                    continue
                code = exit_code(found, named=bool(names))
                for line in audit_lines(found, as_json=as_json):
                    write_line(line)
                if not repeat:
                    break
        if code != ExitCode.OK:
            raise SystemExit(int(code))


@app.command()
def rebuild(
    config: ConfigFile,
    table: Annotated[list[str], typer.Option(help="Source table as schema.table. Repeatable.")],
    *,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="End a rebuild: the table stays as it is, also parked.")
    ] = False,
) -> None:
    """Ask `run` to bring parked tables to the others again, or to make other tables anew.

    A parked table goes on from its rows with all that it lacks; first remove the reason why it was
    refused. A table that follows, or whose rows are not to be trusted, is filled from Kafka anew,
    beside the epochs: its old rows stay until then.
    """
    with exit_codes(as_json=False), _operating(config) as operator:
        if cancel:
            for name, parked in operator.cancel_rebuild(table):
                then = "stays parked" if parked else "goes on with the epochs as it is"
                write_line(f"{name}: its rebuild is cancelled; it {then}")
            return
        for name, anew in operator.rebuild(table):
            how = "makes it anew beside its epochs" if anew else "brings it to the others again"
            write_line(f"{name}: `slottables run` {how}")


@app.command()
def maintain(config: ConfigFile, as_json: Json = False) -> None:
    """Compact tables, remove old epochs and orphaned files. `run` may run meanwhile."""
    with exit_codes(as_json=as_json), _operating(config) as operator:
        for done in operator.maintain():
            if as_json:
                write_line(json.dumps(asdict(done)))
            else:
                write_line(
                    f"{done.table}: {done.files_before} files, now {done.files_after};"
                    f" {done.snapshots} snapshots, {done.orphans} lost files removed"
                )


@app.command()
def epochs(config: ConfigFile, as_json: Json = False) -> None:
    """List the epochs that are kept: number, LSN, tag, commit time, snapshots."""
    with exit_codes(as_json=as_json), _operating(config) as operator:
        for found in operator.epochs():
            write_line(json.dumps(found) if as_json else f"{found['epoch']} {found['tag']}")


@app.command()
def tag(
    config: ConfigFile,
    as_of: Annotated[str, typer.Option(help="Take the last epoch up to this LSN.")],
    as_json: Json = False,
) -> None:
    """Tag one epoch in all tables, so that queries join them by one name. `run` may go on."""
    with exit_codes(as_json=as_json), _operating(config) as operator:
        for table, name in operator.tag(read_lsn(as_of)):
            write_line(json.dumps({"table": table, "tag": name}) if as_json else f"{table} {name}")


@app.command()
def blame(
    config: ConfigFile,
    table: Annotated[str, typer.Option(help="Source table as schema.table.")],
    key: Annotated[
        list[str],
        typer.Option(help="Value of a key column. Repeat it for each, in the table's order."),
    ],
    as_json: Json = False,
) -> None:
    """Show what each transaction made of a row: LSN, commit time, xid, values that changed."""
    with exit_codes(as_json=as_json):
        from spark_consumers.blame import blame

        settings = load_settings(config)
        with _session(settings) as spark:
            for version in blame(spark, settings, table, key):
                write_line(json.dumps(version.document()) if as_json else version.line())


@app.command()
def status(
    config: ConfigFile,
    as_json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")
    ] = False,
    every_s: Annotated[
        float, typer.Option(min=0.5, help="With --watch: seconds between two looks.")
    ] = 2.0,
) -> None:
    """Show how far `run` is: epoch, lag, events of each table since the start, parked tables.

    It asks `run` at tables.http_port. --watch shows events a second, too; with --json, a document
    a line. Exit codes: 0 `run` answered; 1 a table is parked (at the last look); 10 no answer.
    """
    from rich.console import Console

    from spark_consumers.status import read_run_status

    with exit_codes(as_json=as_json):
        tables = require(load_settings(config).tables, "tables")
        stop, before = stop_on_signals() if watch else None, None
        console = Console(highlight=False, soft_wrap=True)
        while True:
            found = read_run_status(tables)
            if as_json:
                write_line(json.dumps(found.document(before)))
            else:
                if watch:
                    console.clear()
                console.print(found.screen(before))
            before = found
            if stop is None or stop.wait(every_s):
                break
        if found.parked:
            raise SystemExit(int(ExitCode.CHECK_FAILED))


@app.command(hidden=True)
def executor() -> None:
    """Become one of Spark's executors, as Spark's driver asks of a pod of this image."""
    import pyspark

    from spark_consumers.executor import executor_command

    with exit_codes(as_json=False):
        command = executor_command(os.environ, Path(pyspark.__path__[0]))
        os.execvp(command[0], command)  # noqa: S606 - it stays the first process of its pod


@app.command()
def restore(
    config: ConfigFile,
    as_of: Annotated[str, typer.Option(help="LSN: take the last epoch up to it.")],
    into: Annotated[
        str,
        typer.Option(
            envvar="SLOTTABLES_RESTORE_INTO",
            show_envvar=True,
            help="libpq connection string of the database to fill; keep the password in a passfile "
            "or PGPASSWORD.",
        ),
    ],
    table: Annotated[
        list[str] | None, typer.Option(help="Source table as schema.table. Repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check tables and target; restore nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Restore tables into a PostgreSQL database, as they were at an LSN. `run` may run meanwhile.

    Without --table: all tables but changelogs and sums. The database gets all of them or none.
    """
    with exit_codes(as_json=as_json):
        from spark_consumers.restore.bars import bars
        from spark_consumers.restore.restoration import restore

        settings, lsn = load_settings(config), read_lsn(as_of)
        with _session(settings) as spark, bars() as progress:
            found = restore(
                spark,
                settings,
                lsn,
                into,
                tables=tuple(table or ()),
                dry_run=dry_run,
                progress=progress,
            )
        for line in found.documents() if as_json else found.lines():
            write_line(line if isinstance(line, str) else json.dumps(line))


@app.command()
def jars(
    into: Annotated[Path, typer.Option(help="Folder to put them into; it is made.")],
    s3: Annotated[
        bool, typer.Option("--s3", help="Also what a warehouse on S3 needs (iceberg-aws-bundle).")
    ] = False,
) -> None:
    """Download and verify the jars that Spark needs; print the line for tables.spark_options."""
    with exit_codes(as_json=False):
        from services.testbed.jars import resolve

        groups = ("spark", "iceberg-aws") if s3 else ("spark",)
        found = [path for group in groups for path in resolve(group, cache=into.absolute())]
        write_line(f"spark.jars: {','.join(map(str, found))}")


@contextlib.contextmanager
def _operating(config: Path) -> Iterator["Operator"]:
    from spark_consumers.operations import Operator

    settings = load_settings(config)
    with _session(settings) as spark:
        yield Operator(spark, settings)


@contextlib.contextmanager
def _session(settings: Settings) -> Iterator["SparkSession"]:
    from spark_consumers.session import start_session

    spark = start_session(require(settings.tables, "tables"), readable(settings))
    try:
        yield spark
    finally:
        spark.stop()


def _print_json(report: EpochReport) -> None:
    write_line(json.dumps(report.document()))


def _print_line(report: EpochReport) -> None:
    found = report.document()
    write_line(
        f"epoch {found['epoch']}: {found['transactions']} transactions, {found['events']} events,"
        f" {len(report.tables)} tables, up to {found['commit_lsn']}, {found['seconds']} s,"
        f" {found['lag_ms']} ms behind"
    )
