"""From JSON text to a binary form, as a schema has it; codecs.pyx has it."""

class Transcoder:
    """A function from JSON text to the bytes of one schema. One thread at a time.

    `declined`: how many texts were left to the library.
    """

    declined: int

    def __call__(self, text: str) -> bytes:
        """Return the bytes that the library makes of `text`, or raise the error that it raises."""

    def transcode(self, text: bytes) -> bytes | None:
        """Return the bytes of a text in UTF-8 without the library, None if it is left to that."""
