"""A steady load of small transactions from a process of its own, with the time of each COMMIT."""

import multiprocessing
import threading
import time
from multiprocessing.connection import Connection as Pipe

import psycopg

INSERT = b"INSERT INTO narrow VALUES ($1, 1, 'customer', 2.25, 'note', now())"


class Load:
    """`rate` transactions of one row in a second over `clients` connections, for `seconds`."""

    def __init__(
        self, conninfo: str, *, first: int, rate: float, seconds: float, clients: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._receiver, sender = context.Pipe(duplex=False)
        arguments = (conninfo, first, rate, seconds, clients, sender)
        self._process = context.Process(target=_write, args=arguments, daemon=True)
        self._process.start()
        sender.close()

    @property
    def writing(self) -> bool:
        """Whether it has not told yet."""
        return not self._receiver.poll()

    def committed(self) -> dict[int, float]:
        """id -> when its COMMIT returned (time.monotonic, the same clock in every process)."""
        found: dict[int, float] = self._receiver.recv()
        self._process.join()
        return found


def _write(
    conninfo: str, first: int, rate: float, seconds: float, clients: int, sender: Pipe
) -> None:
    committed: list[dict[int, float]] = [{} for _ in range(clients)]
    count = int(rate * seconds)
    threads = [
        threading.Thread(
            target=_client,
            args=(conninfo, range(first + number, first + count, clients), clients / rate, mine),
        )
        for number, mine in enumerate(committed)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sender.send({number: at for mine in committed for number, at in mine.items()})


def _client(conninfo: str, numbers: range, pause_s: float, committed: dict[int, float]) -> None:
    with psycopg.connect(conninfo, autocommit=True, prepare_threshold=0) as connection:
        cursor = psycopg.RawCursor(connection)
        cursor.execute(b"SELECT 1")
        due = time.monotonic() + 0.2
        for number in numbers:
            due += pause_s
            if (wait_s := due - time.monotonic()) > 0:
                time.sleep(wait_s)
            cursor.execute(INSERT, [number])
            committed[number] = time.monotonic()
