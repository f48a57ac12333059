"""Traces: the section `tracing`, and the trace ids that bridge and tables compute alike."""

import hashlib
from typing import Final

from pydantic import BaseModel, ConfigDict

TRACEPARENT: Final = "traceparent"
"""Header of an END event: W3C's Trace Context, of the span of the Kafka transaction with it."""


class TracingSettings(BaseModel):
    """Traces over OTLP, from the commit in PostgreSQL to the tables (docs/guides/tracing.md).

    The standard environment variables OTEL_* say where to, and how many."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = False
    """Export spans, and give each END event of <prefix>.transaction a header `traceparent`. Needs
    the extra `otel`, which the images have."""


def trace_id(*names: object) -> int:
    """Return the trace id of `names`; it is the same after a crash.

    Of a Kafka transaction that is (system identifier, commit LSN of its first source transaction).
    """
    text = " ".join(map(str, names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16])
