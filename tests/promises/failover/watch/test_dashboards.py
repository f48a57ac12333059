"""Every query of the dashboards `bridge` and `failover`, by a Prometheus that scrapes both."""

from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from services.testbed.bed import Bed
from services.testbed.ports import free_port
from tests.promises.bridge.running import Bridge
from tests.promises.failover.conftest import NewTrio, machines
from tests.promises.failover.drill import both
from tests.promises.failover.servers import configuration, slotfailover_process, write
from tests.promises.failover.watch.test_live import prepare
from tests.promises.failover.watch.watch_process import SETTINGS, Watching
from tests.providers.interface import Broker
from tests.providers.prometheus import prometheus
from tests.providers.waiting import eventually
from tools.dashboards import queries

UNANSWERED = {
    "Unfinished run": "the pair has none, and then there is no series",
    "Last drill": "nobody has run a drill on this pair",
}
"""Panels that show nothing here, and why."""


@pytest.mark.long
def test_every_query_is_answered(
    local_trio: NewTrio, local_bed: Bed, kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    trio = local_trio(settings={"max_slot_wal_keep_size": "1GB"})
    port = free_port()
    bridge = Bridge(
        *(tmp_path, both(trio), kafka, topic_prefix),
        loaded=False,
        http_port=port,
    )
    prepare(trio, bridge)
    config = configuration(
        tmp_path, trio, machines=machines(trio, local_bed), watch={**SETTINGS, "repoint": False}
    )
    watching = Watching(config)
    try:
        ran = slotfailover_process(
            *("switchover", "--to", "b", "--config", str(config), "--yes"), timeout_s=300
        )
        assert ran.code == 0, ran.err
        numbers = count(1, 10)
        targets = {"bridge": port, "failover": urlsplit(watching.url).port or 0}
        asked = [*queries("bridge"), *queries("failover")]
        with prometheus(tmp_path, targets) as server:
            unanswered: dict[str, str] = {}

            def settled() -> bool:
                write(trio.standby, trio.dbname, next(numbers))
                unanswered.clear()
                unanswered.update((panel, q) for panel, q in asked if not server.ask(q))
                return unanswered.keys() == UNANSWERED.keys()

            try:
                eventually(settled, what="all queries are answered", timeout_s=80, interval_s=1)
            finally:
                assert unanswered.keys() == UNANSWERED.keys(), unanswered
    finally:
        watching.end()
        bridge.end()
