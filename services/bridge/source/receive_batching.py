"""Batch socket reads under load: raise SO_RCVLOWAT so that the walsender's small sends coalesce.

PostgreSQL sends each message by itself. While the receiver's window is open, each of these sends
goes through all of TCP, up to the receiver's waking; while it is closed, they gather in the
sender's socket and go many at once. So the bridge reads from a near, busy server only when the
window is almost closed, and makes the window close soon by a small receive buffer. This saves CPU
on both sides.

    little comes        whatever arrives wakes the bridge at once
    BYTES_PER_S come    BATCH_BYTES wake it, or BATCH_S passed without

A far server (RTT_US_MAX) keeps its window: it needs it for what is on the way.

Source: Linux, tcp(7), socket(7) SO_RCVLOWAT, net/ipv4/tcp_input.c `tcp_data_ready`;
src/backend/replication/walsender.c `WalSndWriteData`.
"""

import contextlib
import os
import socket
import struct
from typing import Final

BUFFER_BYTES: Final = 2**17
BATCH_BYTES: Final = BUFFER_BYTES // 2
"""The kernel allows no more than half of the buffer."""
BATCH_S: Final = 0.008
BYTES_PER_S: Final = BATCH_BYTES / BATCH_S
RATE_S: Final = 0.02
"""The interval over which the rate is measured."""
BEHIND_MESSAGES: Final = 100
"""A read of this many messages means that the server sends faster than we read."""
BEHIND_BYTES: Final = BATCH_BYTES * 3 // 2
"""A read of this many bytes means the same while reads are batched."""
RTT_US_MAX: Final = 500
_MIN_RTT: Final = struct.Struct("148xI")
"""tcpi_min_rtt, in microseconds. Source: Linux, include/uapi/linux/tcp.h `tcp_info`."""


class Pace:
    """Decides by the rate whether to batch reads. Pure: time (time.monotonic) is an argument."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._bytes = 0
        self.batches = False

    def read(self, size: int, now: float) -> bool:
        """Count `size` bytes read by `now`; tell whether `batches` has changed."""
        self._bytes += size
        passed_s = now - self._since
        if passed_s < RATE_S:
            return False
        before, self.batches = self.batches, self._bytes >= BYTES_PER_S * passed_s
        self._since, self._bytes = now, 0
        return self.batches != before

    def behind(self, messages: int, size: int) -> bool:
        """Return whether a read of this size means that more is waiting."""
        return size >= BEHIND_BYTES if self.batches else messages >= BEHIND_MESSAGES


class Gathering:
    """Receive batching of one streaming connection. Where the kernel can't, reads are not batched.

    `now` is the time at which streaming starts, by the clock of `read` (time.monotonic).
    """

    def __init__(self, descriptor: int, now: float) -> None:
        self._pace = Pace(now)
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._near = False
        with contextlib.suppress(OSError, AttributeError, struct.error):
            if self._socket.family != socket.AF_UNIX and _min_rtt_us(self._socket) <= RTT_US_MAX:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES // 2)
                self._near = True  # the kernel doubles what it is told

    @property
    def wait_max_s(self) -> float:
        """How long less than BATCH_BYTES may wait in the socket."""
        return BATCH_S if self._pace.batches else float("inf")

    def read(self, size: int, now: float) -> None:
        """Count `size` bytes read by `now`, and adapt when the socket wakes us."""
        if self._near and self._pace.read(size, now):
            self._wake_at(BATCH_BYTES if self._pace.batches else 1)

    def behind(self, messages: int, size: int) -> bool:
        """Return whether a read of this size means that the server has more to send."""
        return self._pace.behind(messages, size)

    def close(self) -> None:
        """Let any byte wake the reader again, because libpq itself waits for the rest."""
        if self._pace.batches:
            self._wake_at(1)
        self._socket.close()

    def _wake_at(self, size: int) -> None:
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


def _min_rtt_us(connected: socket.socket) -> int:
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
    return int(_MIN_RTT.unpack(info)[0])
