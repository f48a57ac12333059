"""A real PgBouncer in front of a server, where one is installed: Debian's package `pgbouncer`."""

import contextlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from services.testbed.ports import free_port
from services.testbed.users import server_user
from tests.providers.waiting import eventually

INSTALLED = shutil.which("pgbouncer")


@contextlib.contextmanager
def pgbouncer(target: int, mode: str) -> Iterator[int]:
    """The port by which PgBouncer leads to the server at `target`; `mode`: its pool_mode."""
    assert INSTALLED is not None
    port, user = free_port(), server_user()
    with tempfile.TemporaryDirectory(prefix="pgbouncer-") as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "pgbouncer.ini"
        path.write_text(
            f"[databases]\n* = host=127.0.0.1 port={target} user=postgres\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = any\n"
            f"pool_mode = {mode}\nunix_socket_dir =\n"
        )
        owner = user.name if user.switch else None
        with subprocess.Popen([INSTALLED, "-q", path], user=owner) as process:
            try:
                eventually(lambda: _listens(port), what="PgBouncer listens")
                yield port
            finally:
                process.kill()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
