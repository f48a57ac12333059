"""The command `watch`: runs until SIGTERM or SIGINT."""

import os
from typing import Annotated

import typer

from schemas.config_option import ConfigFile
from services.failover.cli.options import settings_of
from services.failover.observe.cluster import Cluster
from services.failover.plan.request import Request
from services.runtime.process import Probes, configure_logging, exit_codes, stop_on_signals


def watch(
    config: ConfigFile,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Write the log as JSON lines.")
    ] = False,
) -> None:
    """Observe at an interval, serve the result, and repoint if `failover.watch.repoint` is on."""
    import structlog  # all imported late: a failover, of the same command, is in a hurry

    from services.failover.watch.decision import held_remark
    from services.failover.watch.lease.elector import election_of
    from services.failover.watch.loop import Watch
    from services.failover.watch.web.api import SECTION, Api
    from services.failover.watch.web.metrics import registry_of
    from services.runtime.access import read_token

    with exit_codes():
        settings, bridge = settings_of(config)
        configure_logging(json_lines=json_lines)
        logger = structlog.get_logger(__name__)
        given = settings.watch
        token = read_token(given.token, given.token_file, section=SECTION)
        request = Request(
            lag_bytes_max=settings.lag_bytes_max,
            synchronous_standbys=settings.synchronous_standbys,
        )
        stop = stop_on_signals()
        election = election_of(given.lease, os.environ)
        with election.keep(), Cluster(settings, bridge) as cluster:
            loop = Watch(settings, cluster, request, election)
            api = Api(loop, request, token, given)
            with Probes(
                given.http_host,
                given.http_port,
                healthy=loop.healthy,
                ready=loop.ready,
                remark=lambda: held_remark(loop.snapshot.memory.assessment.held),
                routes=api.routes(),
                registry=registry_of(lambda: loop.snapshot),
            ) as probes:
                logger.info(
                    "watching",
                    nodes=sorted(settings.nodes),
                    url=f"http://{given.http_host}:{probes.port}/",
                    automatic=given.repoint,
                    lease=given.lease.name or None,
                    orders="taken" if token else "refused: no token is set",
                )
                loop.run(stop)
        logger.info("stopped")
