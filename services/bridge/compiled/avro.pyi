"""From JSON text to Avro's binary form; avro.pyx has it."""

from collections.abc import Callable, Mapping
from typing import Any

def transcoder(
    schema: Mapping[str, Any], head: bytes, otherwise: Callable[[str], bytes]
) -> Callable[[str], bytes]:
    """Return a Transcoder of a struct's documents, which stand behind `head`.

    `schema`: as services.bridge.events.formats.connect has them. `otherwise`: what takes the texts
    that the transcoder declines; it is returned where no transcoder can be made.
    """
