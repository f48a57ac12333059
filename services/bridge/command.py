"""The command `slotbridge`."""

import contextlib
from pathlib import Path
from typing import Annotated

import structlog
import typer

from schemas.settings import load_settings, require
from services.bridge.runner import Runner
from services.process import Probes, configure_logging, exit_codes, stop_on_signals

logger = structlog.get_logger(__name__)
app = typer.Typer(
    help="PostgreSQL changes to Kafka, exactly once, through crashes and failover.",
    no_args_is_help=True,
    add_completion=False,
)
ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="YAML configuration file.")]
JsonLogs = Annotated[bool, typer.Option("--json", help="Log JSON lines.")]


@app.callback()
def _slotbridge() -> None:
    """Keep `run` a subcommand even while it is the only one."""


@app.command()
def run(config: ConfigFile, json: JsonLogs = False) -> None:
    """Stream changes until SIGTERM; restart it as often as you like.

    Exit codes: 0 stopped cleanly; 2 settings; 10-19 try again; 20-29 a server, privilege or
    resource needs an operator; 30-39 positions disagree; 40-49 a message or record is refused.
    """
    configure_logging(json_lines=json)
    with exit_codes(), contextlib.ExitStack() as stack:
        settings = load_settings(config)
        source = require(settings.source, "source")
        kafka = require(settings.kafka, "kafka")
        stop = stop_on_signals()
        runner = Runner(source, kafka, settings.bridge, stop)
        if settings.bridge.http_port is not None:
            probes = Probes(
                settings.bridge.http_host,
                settings.bridge.http_port,
                healthy=runner.healthy,
                ready=runner.ready,
            )
            stack.enter_context(probes)
            logger.info("serving", url=f"http://{settings.bridge.http_host}:{probes.port}/metrics")
        runner.run()


def main() -> None:
    """The entry point."""
    app()
