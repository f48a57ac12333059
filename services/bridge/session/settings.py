"""The settings of one session of the bridge."""

from typing import TYPE_CHECKING, NamedTuple

from schemas.large_values import ClaimCheckSettings
from schemas.settings import BridgeSettings, KafkaSettings, SourceSettings
from schemas.shaping import ShapingSettings
from schemas.snapshot import SnapshotSettings

if TYPE_CHECKING:
    from services.runtime.otlp import Spans


class SessionSettings(NamedTuple):
    """The settings of a session. `streaming`: large transactions arrive before their commit.

    `rows_since_lsn`: where the first session of this process began, None in that one. `spans`: None
    while tracing is off.
    """

    source: SourceSettings
    kafka: KafkaSettings
    bridge: BridgeSettings
    shaping: ShapingSettings
    snapshot: SnapshotSettings
    streaming: bool
    rows_since_lsn: int | None = None
    spans: "Spans | None" = None
    claim_check: ClaimCheckSettings | None = None
