"""pgbench as the load: its own TPC-B transactions, and scripts of ours beside them.

tpcb-like          pgbench's own: one row of accounts, tellers, branches each, and a history row
changes.sql        upserts, deletes, moved keys, rows without a key; subtransactions
large.sql          up to 800 rows with one LSN, or many updates, in one transaction
rolled_back.sql    changes that nobody may ever see
"""

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psycopg

from services.testbed.users import postgres_programs, server_user
from tests.promises.adoption.load import HISTORY, PGBENCH_KEYS
from tests.providers.interface import Server
from tests.providers.waiting import eventually, patient

_SCRIPTS: Final = Path(__file__).parent / "pgbench"
_WEIGHTS: Final = {"changes": 10, "large": 1, "rolled_back": 2}
_SECONDS: Final = 300
"""How long pgbench works at most once it was told to; a round needs less."""
_TABLES: Final = """
    CREATE SEQUENCE blocks START 1000000;
    CREATE FUNCTION move(was text, now text) RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        UPDATE moved SET id = now, version = nextval('versions') WHERE id = was;
    EXCEPTION WHEN unique_violation THEN
        NULL;
    END $$;
"""


def make_tables(server: Server, dbname: str) -> None:
    """Make pgbench's tables with their rows in a database with the tables of `load.SETUP`."""
    server.run_tool("pgbench", ["-i", "-q", "-I", "dtgp", "-s", "1", server.conninfo(dbname)])
    with psycopg.connect(server.conninfo(dbname), autocommit=True) as connection:
        connection.execute(_TABLES.encode())
        for table, (key, version) in {**PGBENCH_KEYS, HISTORY: ("aid", "delta")}.items():
            connection.execute(
                f"CREATE TRIGGER told AFTER INSERT OR UPDATE OR DELETE ON {table}"
                f" FOR EACH ROW EXECUTE FUNCTION told('{key}', '{version}')".encode()
            )
            connection.execute(f"ALTER PUBLICATION pub ADD TABLE {table}".encode())


class PgbenchLoad:
    """pgbench on one database, which works between `go` and `pause` until `stop`."""

    def __init__(self, conninfo: str, seed: int, folder: Path, *, clients: int = 3) -> None:
        self._conninfo = conninfo
        self._seed = seed
        self._log = folder / f"pgbench-{seed}.log"
        self._clients = clients
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._ended = False

    def go(self) -> None:
        """Start pgbench unless it works."""
        if self._ended or (self._process is not None and self._process.poll() is None):
            return
        self._starts += 1
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log)

    def pause(self) -> None:
        """End pgbench where it is; what it has not committed is rolled back."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            assert self._process.wait(patient(60)) in (0, -signal.SIGTERM), self._log.read_text()[
                -3000:
            ]
            self._process = None

    def stop(self) -> None:
        """End it for good."""
        self.pause()
        self._ended = True

    def more(self, count: int) -> None:
        """Wait until `count` more transactions are committed."""
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            wanted = _committed(connection) + count
            eventually(
                lambda: _committed(connection) >= wanted,
                what=f"{count} more transactions",
                timeout_s=120,
            )

    def _command(self) -> Sequence[str | Path]:
        scripts = [f"--file={_SCRIPTS / name}.sql@{of_it}" for name, of_it in _WEIGHTS.items()]
        return (
            postgres_programs(server_user()) / "pgbench",
            *("-n", "--builtin=tpcb-like@10", *scripts, f"--client={self._clients}"),
            *("--rate=60", "--max-tries=100", f"--time={_SECONDS}"),
            f"--random-seed={self._seed * 100 + self._starts}",
            self._conninfo,
        )


def _committed(connection: psycopg.Connection[tuple[int]]) -> int:
    row = connection.execute("SELECT count(DISTINCT txid) FROM truth").fetchone()
    assert row is not None
    return row[0]
