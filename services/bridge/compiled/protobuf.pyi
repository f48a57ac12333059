"""From JSON text to Protobuf's wire form; protobuf.pyx has it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

def transcoder(
    schema: Schema,
    numbers: Callable[[Schema], Sequence[int]],
    decimal_constants: Callable[[Schema], tuple[int, int] | None],
    head: bytes,
    otherwise: Callable[[str], bytes],
) -> Callable[[str], bytes]:
    """Return a Transcoder, as services.bridge.compiled.avro.transcoder.

    `numbers`: those of a struct's fields; `decimal_constants`: a Decimal's precision and scale,
    None of other schemas.
    """
