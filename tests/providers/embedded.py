"""Servers from Python packages: services.testbed's test bed."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from services.testbed.bed import Bed
from tests.providers.interface import Broker, Provider, Server, Trio


class Embedded:
    """The Provider on a lazy Bed."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed

    @property
    def primary(self) -> Server:
        return self.bed.primary

    @property
    def standby(self) -> Server:
        return self.bed.standby

    @property
    def subscriber(self) -> Server:
        return self.bed.subscriber

    @property
    def kafka(self) -> Broker:
        return self.bed.kafka

    @property
    def dbname(self) -> str:
        return self.bed.dbname

    def start(self, *parts: str) -> None:
        """See Provider."""
        self.bed.start(*parts)

    @contextlib.contextmanager
    def new_trio(self, *, synchronous: bool, settings: Mapping[str, str | int]) -> Iterator[Trio]:
        """See Provider."""
        with self.bed.new_pair(synchronous=synchronous, settings=settings) as (pair, subscriber):
            yield Trio(pair.primary, pair.standby, subscriber, pair.dbname)


@contextlib.contextmanager
def embedded(folder: Path, *, postgres: str = "") -> Iterator[Provider]:
    """A provider whose servers live in `folder` until the end of the block.

    `postgres`: see Bed.
    """
    with Bed(folder, lazy=True, postgres=postgres) as bed:
        yield Embedded(bed)
