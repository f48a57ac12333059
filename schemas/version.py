"""The version of the installed package, the only place where the code has one."""

import functools
import sys
from importlib import metadata

UNKNOWN = "unknown"


@functools.cache
def version() -> str:
    """Return the version from the package's metadata; UNKNOWN where the package is not installed.

    Cached, because the bridge writes it into every event's encoder.
    """
    try:
        return metadata.version("slotbridge")
    except metadata.PackageNotFoundError:
        return UNKNOWN


def print_version(wanted: bool) -> None:
    """Print the version and end the command, as the callback of the option `--version`."""
    if wanted:
        sys.stdout.write(f"slotbridge {version()}\n")
        raise SystemExit(0)
