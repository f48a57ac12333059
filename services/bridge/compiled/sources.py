"""A digest of the C extension's sources, to detect a stale build; setup.py runs this file alone.

Each module is built with the digest of all sources, and one that has another is not used.
"""

import hashlib
from pathlib import Path

_SUFFIXES = (".pyx", ".pxd", ".pxi")


def digest() -> str:
    """Return the SHA-256 of the sources in hex, "" where the sources are not there."""
    found = sorted(p for p in Path(__file__).parent.iterdir() if p.suffix in _SUFFIXES)
    content = hashlib.sha256()
    for path in found:
        content.update(path.read_bytes())
    return content.hexdigest() if found else ""
