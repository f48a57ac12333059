"""The settings of one session of the bridge."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from schemas.config_option import acceptance_of
from schemas.large_values import ClaimCheckSettings
from schemas.settings import BridgeSettings, KafkaSettings, Settings, SourceSettings
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


def with_accepted(settings: Settings, tokens: Iterable[str] | None) -> Settings:
    """Return the settings with the tokens of --accept in bridge.accept. Raise SettingsError."""
    accept = (*settings.bridge.accept, *map(str, acceptance_of(tokens).tokens))
    bridge = settings.bridge.model_copy(update={"accept": accept})
    return settings.model_copy(update={"bridge": bridge})
