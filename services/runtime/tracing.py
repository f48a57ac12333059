"""Whether spans are made, and by what; OpenTelemetry is imported only where they are."""

import os
from typing import TYPE_CHECKING, Final

from schemas.errors import SettingsError
from schemas.tracing import TracingSettings

if TYPE_CHECKING:
    from prometheus_client import Counter

    from services.runtime.otlp import Spans

HELP: Final = (
    "Spans of traces, by outcome: exported, failed (the collector did not take them), dropped "
    "(too many waited for the collector). No series while tracing is off."
)
_ONLY: Final = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
}
"""Standard variables that have one value here."""


def open_spans(tracing: TracingSettings, service: str, outcomes: "Counter") -> "Spans | None":
    """Return the maker of spans for `service`, or None if tracing is off.

    Raise SettingsError where it is on and can't be had.
    """
    if not tracing.enabled:
        return None
    for name, value in _ONLY.items():
        if os.environ.get(name, value) not in ("", value):
            raise SettingsError(
                f"{name} is {os.environ[name]}, but only {value} is supported",
                operation="begin tracing",
                hint=f"set it to {value}, or tracing.enabled to false",
            )
    try:
        from services.runtime.otlp import Spans
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"tracing.enabled needs the Python package {error.name}",
            operation="begin tracing",
            hint="install slotbridge[otel], or set tracing.enabled to false",
        ) from error
    try:
        return Spans(service, outcomes)
    except ValueError as error:
        raise SettingsError(
            f"a variable OTEL_* has an invalid value: {error}", operation="begin tracing"
        ) from error
