"""Sends a signal for snapshots to where the settings say: the signal table or the signal topic."""

import json
import uuid
from collections.abc import Iterable
from typing import Final

from schemas.errors import SettingsError
from schemas.settings import Settings, require
from services.bridge.snapshot.requests import Signal, check_signal
from services.bridge.snapshot.signal_table import insert_signal
from services.bridge.snapshot.signal_topic import send_to_topic

READ_ROWS: Final = "execute-snapshot"


def rows_of(tables: Iterable[str]) -> dict[str, object]:
    """Return the data of a signal that asks for the rows of `tables`."""
    return {"data-collections": [*tables], "type": "incremental"}


def require_signals(settings: Settings) -> None:
    """Raise SettingsError where the settings name neither signal table nor topic."""
    if settings.snapshot.signal_table is None and settings.snapshot.signal_topic is None:
        raise SettingsError(
            "neither snapshot.signal_table nor snapshot.signal_topic is set",
            operation="send a signal",
            hint="name a published table with the columns id, type, data, or a topic "
            "(docs/guides/snapshots.md)",
        )


def send_signal(settings: Settings, kind: str, data: dict[str, object]) -> str:
    """Send the signal; return its id. Raise SlotbridgeError."""
    source, kafka = require(settings.source, "source"), require(settings.kafka, "kafka")
    signal = Signal(str(uuid.uuid4()), kind, json.dumps(data))
    check_signal(signal)
    require_signals(settings)
    table, topic = settings.snapshot.signal_table, settings.snapshot.signal_topic
    if table is not None:
        insert_signal(source, table, signal)
    elif topic is not None:
        send_to_topic(kafka, topic, signal)
    return signal.id
