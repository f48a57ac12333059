"""The commands that connect to nothing: `check-config`, `schema`, and what is shipped."""

from importlib.util import find_spec
from typing import Annotated, Final

import typer

from schemas.config_option import ConfigFile
from schemas.settings import Settings, load_settings
from services.bridge.events.shaping.tables import Shaping
from services.bridge.recovery.fit import named_relations
from services.bridge.source.hosts import host_name, single_hosts, standby_conninfo
from services.runtime.access import read_token
from services.runtime.process import exit_codes
from services.shipped import Kind, names, text

_COMMANDS = {
    "source": "slotbridge run and status, slottables verify",
    "kafka": "slotbridge, slottables",
    "failover": "slotfailover",
    "tables": "slottables",
}
_JARS: Final = frozenset({"spark.jars", "spark.jars.packages"})


def check_config(
    config: ConfigFile,
) -> None:
    """Check the configuration file: keys, values, token files. Connects to no server.

    Expressions are parsed, and columns that choose partitions are compared with column lists;
    `slotbridge preflight` tells whether both fit their tables.

    Exit codes: 0 the file is right; 2 something in it is wrong.
    """
    with exit_codes():
        settings = load_settings(config)
        unjudged = _judge_shaping(settings)
        bridge, watch = settings.bridge, settings.failover.watch if settings.failover else None
        read_token(bridge.token, bridge.token_file, section="bridge")
        if watch is not None:
            read_token(watch.token, watch.token_file, section="failover.watch")
        for name, commands in _COMMANDS.items():
            there = "ok" if getattr(settings, name) is not None else "not there"
            typer.echo(f"{name:<9} {there:<9}  needed by {commands}")
        for advice in _advice(settings):
            typer.echo(f"note: {advice}")
        typer.echo(
            "not judged: whether servers answer, roles, topics, server settings, " + unjudged
        )


def _judge_shaping(settings: Settings) -> str:
    """Raise SettingsError for shaping that fits no table; return what of it is not judged.

    That is an expression that is not CEL, or a column that is to choose the partition of a named
    table and is left out.
    """
    plain = settings.shaping.model_copy(update={"filters": {}, "computed": {}})
    lists = (settings.source.column_lists if settings.source else None) or {}
    for relation in named_relations(plain, lists):
        Shaping(plain, "").check(relation)
    used = settings.shaping.filters or settings.shaping.computed
    if used and find_spec("cel_expr_python") is None:
        return "expressions (they need slotbridge[expressions]), whether shaping fits its tables"
    Shaping(settings.shaping, "")
    return "whether shaping fits its tables (slotbridge preflight)"


def _advice(settings: Settings) -> list[str]:
    """Return what is allowed and yet likely to be a mistake, and where rows are read."""
    found = []
    if settings.kafka is not None and settings.kafka.replication_factor in (1, 2):
        found.append(
            f"kafka.replication_factor is {settings.kafka.replication_factor}: a topic is lost "
            "with its brokers; use 3"
        )
    if settings.source is not None and len(single_hosts(settings.source)) == 1:
        found.append("source.conninfo names one host: the bridge finds no other after a failover")
    if settings.bridge.http_port is not None and settings.bridge.http_host == "127.0.0.1":
        found.append(
            "bridge.http_host is 127.0.0.1: probes and Prometheus elsewhere can't reach it"
        )
    if settings.tables is not None and not _JARS & settings.tables.spark_options.keys():
        found.append(
            "tables.spark_options has no spark.jars: Spark does not find Kafka and Iceberg unless "
            "spark-submit or the image brings their jars"
        )
    if settings.snapshot.conninfo is not None and settings.source is not None:
        host = host_name(
            standby_conninfo(settings.snapshot.conninfo, settings.source.connect_timeout_s)
        )
        found.append(
            f"rows of a snapshot are read from the standby {host} (snapshot.conninfo), those of "
            "tables without a key from the primary"
        )
    return found


def sql(
    name: Annotated[
        str, typer.Argument(help="Name of a script; without it, all names are listed.")
    ] = "",
) -> None:
    """Print an SQL script for psql, such as `roles`, which creates the roles of all services.

    Example: slotbridge sql roles | psql -d DATABASE -v bridge=slotbridge …
    """
    _print_shipped("sql", name)


def docs(
    name: Annotated[
        str, typer.Argument(help="Name of a page; without it, all names are listed.")
    ] = "",
) -> None:
    """Print a page of the documentation, as Markdown."""
    _print_shipped("docs", name)


def examples(
    name: Annotated[
        str, typer.Argument(help="Name of an example; without it, all names are listed.")
    ] = "",
) -> None:
    """Print an example: configuration, systemd unit, alerts, dashboards, the script `rejoin`."""
    _print_shipped("examples", name)


def schema() -> None:
    """Print the JSON Schema of the configuration file, for an editor to check and complete it."""
    from schemas.json_schema import schema_file_text

    typer.echo(schema_file_text(), nl=False)


def _print_shipped(kind: Kind, name: str) -> None:
    with exit_codes():
        typer.echo(text(kind, name) if name else "\n".join(names(kind)), nl=not name)
