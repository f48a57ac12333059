"""Forks bridges that are loaded already: one starts in a tenth of a second instead of one.

    stdin    {"config", "log", "failpoint", "sabotage", "ends_first"}   start one
             {"reap": true}   bury it
    stdout   {"pid"}          it runs
             {"code"}         it ended

One at a time; its process id stays its own until it is reaped. A bridge ends with whoever started
the fork server. Every passage of a failpoint is counted in a file that outlives the process.
"""

import contextlib
import ctypes
import json
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from pathlib import Path
from typing import IO, Any, Final

from services.bridge import failpoints

_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG, prctl(2)."""
_CELL = struct.Struct("=Q")
STREAMS: Final = {
    "stream committed": "_commit",
    "stream prepared": "release",
    "part of a stream rolled back": "_abort",
}
"""Passages that are no failpoints: methods of Streams."""
_COUNTED: Final = (*failpoints.FAILPOINTS, *failpoints.OF_A_SNAPSHOT, *STREAMS)
_FILE_BYTES: Final = _CELL.size * len(_COUNTED)
_PLACES: Final = {name: _CELL.size * n for n, name in enumerate(_COUNTED)}


_FLUSHED_S: Final = 10.0
"""Within this a transaction's records are acknowledged: what is not, Kafka commits unasked."""


class ForkServer:
    """The process above, from outside; counts passages in the file `passages`."""

    def __init__(self, passages: Path) -> None:
        passages.write_bytes(bytes(_FILE_BYTES))
        self._passages = passages
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.fork_server", passages],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def start(
        self, config: Path, log: Path, failpoint: str, sabotage: str, *, ends_first: bool
    ) -> int:
        """A bridge's process id. `ends_first`: as in `_know_ends_first`."""
        order = {"config": str(config), "log": str(log), "failpoint": failpoint}
        self._tell(order | {"sabotage": sabotage, "ends_first": ends_first})
        return int(self._hear()["pid"])

    def await_end(self) -> int:
        """The bridge's exit code, negative for a signal, once it has ended; then `reap` it."""
        return int(self._hear()["code"])

    def reap(self) -> None:
        """From now on its process id may be another's."""
        self._tell({"reap": True})

    def close(self) -> None:
        """End it and what it has started."""
        self._process.kill()
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def passages(self) -> Counter[str]:
        """How often each failpoint was passed."""
        content = self._passages.read_bytes()
        return Counter({n: _CELL.unpack_from(content, place)[0] for n, place in _PLACES.items()})

    def _tell(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return {"pid": 0, "code": 0}  # closed
        found: dict[str, Any] = json.loads(line)
        return found


def _main(passages: Path) -> None:
    _end_with_parent()
    count = _counter(passages)
    reach = failpoints.reach

    def counted(name: str) -> None:
        count(name)
        reach(name)

    vars(failpoints)["reach"] = counted  # before others import it
    from services.bridge.cli.app import app
    from services.bridge.transactions.streams import Streams
    from tests.torture.sabotage import commit

    for name, method in STREAMS.items():
        setattr(Streams, method, _also(count, name, getattr(Streams, method)))

    while line := sys.stdin.readline():
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _be_bridge(order, app, commit)
        _say({"pid": pid})
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        _say({"code": code})
        sys.stdin.readline()
        os.waitpid(pid, 0)


def _be_bridge(
    order: dict[str, Any], app: Callable[..., Any], commit: Callable[[str], None]
) -> None:
    code = 1
    try:
        _end_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ[failpoints.VARIABLE] = order["failpoint"]
        random.seed()
        commit(order["sabotage"])
        if order["ends_first"]:
            _know_ends_first()
        app(["run", "--config", order["config"]])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _know_ends_first() -> None:
    """The bridge hears where partitions end before it has Kafka commit, as often happens: it has
    seen no marker of its own then, and takes the loss of one for no loss of records."""
    from services.bridge.sink import transactional_producer
    from services.bridge.sink.markers import MarkerCheck
    from tests.torture.mistakes import put

    flushed = MarkerCheck.flushed

    def and_heard(self: MarkerCheck, topics: Iterable[str]) -> None:
        flushed(self, topics)
        if self._asking is not None:
            wait([self._asking])
        if self._last is not None:
            wait({*self._last.ends.values()})

    put(MarkerCheck, "flushed", and_heard)
    put(transactional_producer, "COMMIT_ATTEMPT_S", _FLUSHED_S)


def _counter(passages: Path) -> Callable[[str], None]:
    file: IO[bytes] = passages.open("r+b")
    cells = mmap.mmap(file.fileno(), _FILE_BYTES)

    def count(name: str) -> None:
        place = _PLACES[name]
        _CELL.pack_into(cells, place, _CELL.unpack_from(cells, place)[0] + 1)

    return count


def _also(
    count: Callable[[str], None], name: str, method: Callable[..., Any]
) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        count(name)
        return method(*arguments)

    return counted


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _say(word: dict[str, int]) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
