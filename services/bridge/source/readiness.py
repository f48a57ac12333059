"""Waiting for sockets, whatever their number.

select() takes descriptors below FD_SETSIZE alone, and a process that talks to a hundred brokers has
more. poll() takes all, but its time-out is in milliseconds: a group commit is due sooner than that.
So poll() is for the descriptors that select() can't take.

Source: Linux, select(2), poll(2).
"""

import math
import select
from typing import Final

FD_SETSIZE: Final = 1024


def wait_readable(descriptors: list[int], timeout_s: float) -> None:
    """Return when one of `descriptors` can be read or is closed by its peer, or at time-out."""
    if max(descriptors) < FD_SETSIZE:
        select.select(descriptors, [], [], max(0.0, timeout_s))
    else:
        _poll(descriptors, select.POLLIN, timeout_s)


def wait_writable(descriptor: int, timeout_s: float) -> None:
    """Return when `descriptor` can be written, or at time-out."""
    if descriptor < FD_SETSIZE:
        select.select([], [descriptor], [], timeout_s)
    else:
        _poll([descriptor], select.POLLOUT, timeout_s)


def _poll(descriptors: list[int], event: int, timeout_s: float) -> None:
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, event)
    poller.poll(math.ceil(max(0.0, timeout_s) * 1000))
