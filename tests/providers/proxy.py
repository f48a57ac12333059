"""A TCP proxy on the loopback that cuts, stalls, delays or forgets connections.

    client ── to_server ──► proxy ──► server
    client ◄── to_client ── proxy ◄── server

What a fault does to the connections that are there, it also does to those that come, until `heal`.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final, Literal

Direction = Literal["to_server", "to_client"]
End = Literal["client", "server"]
BOTH: Final[tuple[Direction, Direction]] = ("to_server", "to_client")
_CHUNK_BYTES: Final = 65_536
_RESET: Final = struct.pack("ii", 1, 0)
_JOIN_S: Final = 10.0


class _Link:
    """One connection; its two ends can be lost one by one."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.ends: dict[End, socket.socket] = {"client": client, "server": server}
        self.lost: set[End] = set()
        self.ended = threading.Event()

    def lose(self, end: End, *, reset: bool) -> None:
        """Close one end; the other is told nothing."""
        self.lost.add(end)
        _end(self.ends[end], reset=reset)

    def end(self, *, reset: bool = False) -> None:
        """Close what is left."""
        self.ended.set()
        for each in self.ends.values():
            _end(each, reset=reset)


class Proxy:
    """Forwards to `target_port`, which may be set later; close it when done.

    `host`: the address that it listens on, where clients come from outside of this machine.
    """

    def __init__(self, target_port: int = 0, *, host: str = "127.0.0.1") -> None:
        self.target_port = target_port
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self._cut = False
        self._forgetting: End | None = None
        self._stalled: frozenset[Direction] = frozenset()
        self._delay_s: dict[Direction, float] = {}
        self._links: list[_Link] = []
        self._closed = threading.Event()
        self._threads = [self._started(self._accept)]

    def cut(self) -> None:
        """Reset all connections, and every new one at once."""
        with self._changed:
            self._cut = True
            links = list(self._links)
        for link in links:
            link.end(reset=True)

    def stall(self, *directions: Direction) -> None:
        """Take what is sent in `directions` (by default both) and forward none of it."""
        with self._changed:
            self._stalled = frozenset(directions or BOTH)

    def delay(self, seconds: float, *directions: Direction) -> None:
        """Let every piece, of up to 64 KiB, wait for `seconds`."""
        with self._changed:
            self._delay_s = dict.fromkeys(directions or BOTH, seconds)

    def half_open(self, keep: End) -> None:
        """Close the other end of all connections; `keep` sees its own open, and no answer."""
        with self._changed:
            self._forgetting = keep
            links = list(self._links)
        for link in links:
            link.lose("server" if keep == "client" else "client", reset=True)

    def heal(self) -> None:
        """Forward again. What was stalled goes on; what has lost an end stays as it is."""
        with self._changed:
            self._cut, self._forgetting = False, None
            self._stalled, self._delay_s = frozenset(), {}
            self._changed.notify_all()

    def close(self) -> None:
        """End everything."""
        self._closed.set()
        self.heal()
        _end(self._listener)
        with self._changed:
            links = list(self._links)
        for link in links:
            link.end()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _started(self, work: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, name="proxy", daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._cut or self._forgetting == "server":
                _end(client, reset=True)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                _end(client, reset=True)
                continue
            self._forward(client, server)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(client, server)
        with self._changed:
            forgetting = self._forgetting
            self._links = [known for known in self._links if not known.ended.is_set()] + [link]
            self._threads = [thread for thread in self._threads if thread.is_alive()]
        if forgetting is not None:
            link.lose("server", reset=True)
        self._threads += [
            self._started(self._pump, link, "client", "server", "to_server"),
            self._started(self._pump, link, "server", "client", "to_client"),
        ]

    def _pump(self, link: _Link, source: End, target: End, direction: Direction) -> None:
        """Forward until one end closes; to an end that is lost, what comes is thrown away."""
        with contextlib.suppress(OSError):
            while data := link.ends[source].recv(_CHUNK_BYTES):
                self._hold(link, direction)
                if target not in link.lost:
                    with contextlib.suppress(OSError):
                        link.ends[target].sendall(data)
        if source not in link.lost:
            self._hold(link, direction)
            link.end()

    def _hold(self, link: _Link, direction: Direction) -> None:
        """Return when a piece may pass."""
        delay_s = self._delay_s.get(direction, 0.0)
        if delay_s:
            link.ended.wait(delay_s)
        with self._changed:
            while direction in self._stalled and not link.ended.is_set():
                self._changed.wait(0.5)


def _end(end: socket.socket, *, reset: bool = False) -> None:
    """Close it, also under a thread that reads from it."""
    with contextlib.suppress(OSError):
        if reset:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        else:
            end.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        if reset:
            end.shutdown(socket.SHUT_RD)
    with contextlib.suppress(OSError):
        end.close()
