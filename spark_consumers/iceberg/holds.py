"""Keeps snapshots that a long command reads, whatever maintenance removes meanwhile.

A hold is a tag whose name says until when it is good. The command removes it at its end; one that a
kill left behind is removed by the maintenance after that time.
"""

import contextlib
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import structlog
from pyspark.sql import SparkSession

from spark_consumers.failures import FOREIGN, translated
from spark_consumers.iceberg import catalog, commits

log = structlog.get_logger()
_PREFIX: Final = "slottables_holds_until_"
_HOLD: Final = re.compile(_PREFIX + "([0-9]+)_[0-9a-f]+")
_LASTS_MS: Final = 24 * 3600 * 1000


@contextlib.contextmanager
def held(spark: SparkSession, snapshots: Mapping[str, int]) -> Iterator[None]:
    """Keep snapshots, by the identifier of their table, while the caller reads them."""
    name = f"{_PREFIX}{_now_ms() + _LASTS_MS}_{uuid.uuid4().hex[:12]}"
    with contextlib.ExitStack() as stack:
        for identifier, snapshot in snapshots.items():
            _hold(catalog.load(spark, identifier), name, snapshot)
            stack.callback(_release, spark, identifier, name)
        yield


def _hold(table: Any, name: str, snapshot: int) -> None:
    commits.change_refs(table, lambda manage: manage.createTag(name, snapshot))


def expired(names: Iterable[str], now_ms: int) -> list[str]:
    """Return the tags of holds, among a table's references, whose time is over. Pure."""
    holds = filter(None, map(_HOLD.fullmatch, names))
    return [hold[0] for hold in holds if int(hold[1]) < now_ms]


def _release(spark: SparkSession, identifier: str, name: str) -> None:
    try:
        commits.forget(catalog.load(spark, identifier), [name])
    except FOREIGN as error:
        failure = translated(error, "release a snapshot")
        log.warning("a tag is left until maintenance removes it", tag=name, error=str(failure))


def _now_ms() -> int:
    return int(time.time() * 1000)
