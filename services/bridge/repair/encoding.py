"""Encodes rows for a repair as streaming encodes them."""

import time
from typing import Final

from schemas.settings import BridgeSettings
from services.bridge.events.event import Stamp
from services.bridge.events.relations import Relations
from services.bridge.events.shaping.large_values import Deposit
from services.bridge.events.shaping.tables import Shaping
from services.bridge.events.values.encoders import Encoders
from services.bridge.repair.repair_events import RepairEvents
from services.bridge.sink.table_names import noted_names
from services.bridge.sink.topics import Topics
from services.bridge.source.database import Primary

_XIDS: Final = 2**32


class Encoding:
    """Makes encoders of one run; each knows of the shapes that Kafka has, and of no others."""

    def __init__(
        self,
        bridge: BridgeSettings,
        shaping: Shaping,
        primary: Primary,
        topics: Topics,
        deposit: Deposit | None = None,
    ) -> None:
        self._deposit = deposit
        self._bridge = bridge
        self._shaping = shaping
        self._primary = primary
        self._topics = topics
        self._encoders = Encoders(bridge, money_digits=primary.money_digits())

    def at(self, commit_lsn: int, xid: int) -> RepairEvents:
        """Return the encoder of the transaction at `commit_lsn`.

        `xid`: of a transaction that every session sees, to tell what the catalog has made since.
        """
        prefix, now_us = self._topics.prefix, time.time_ns() // 1000
        relations = Relations(
            prefix,
            self._primary,
            self._topics.shapes(),
            self._shaping,
            self._encoders,
            deposit=self._deposit,
            table_names=noted_names(self._topics, self._shaping.naming, self._primary.server),
        )
        encoder = RepairEvents(
            prefix,
            self._primary.server.database,
            self._primary.server.timeline,
            relations.describe,
            transaction_metadata=self._bridge.transaction_metadata,
            encoders=self._encoders,
        )
        encoder.begin_repair(
            Stamp(0, commit_lsn, now_us, 0, now_us),
            xid % _XIDS,
            tombstones=self._bridge.tombstones,
        )
        return encoder
