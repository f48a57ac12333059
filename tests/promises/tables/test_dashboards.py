"""Every query of the dashboard `tables`, asked of a Prometheus that scrapes a consumer."""

from itertools import count
from pathlib import Path

import pytest

from services.testbed.ports import free_port
from tests.promises.tables.conftest import NewPipeline
from tests.promises.tables.test_job import ONE, Running, insert
from tests.providers.prometheus import prometheus
from tests.providers.waiting import eventually
from tools.dashboards import queries


@pytest.mark.long
def test_every_query_is_answered(new_pipeline: NewPipeline, tmp_path: Path) -> None:
    port = free_port()
    pipeline = new_pipeline(http_port=port)
    pipeline.publisher.announce(ONE)
    numbers = count(1)
    insert(pipeline, ONE, next(numbers))
    with Running(pipeline) as running, prometheus(tmp_path, {"tables": port}) as server:
        unanswered: list[str] = []

        def settled() -> bool:
            running.sound()
            insert(pipeline, ONE, next(numbers))
            unanswered[:] = [query for _, query in queries("tables") if not server.ask(query)]
            return not unanswered

        try:
            eventually(settled, what="all queries are answered", timeout_s=80, interval_s=1)
        finally:
            assert not unanswered
    running.sound()
