"""Raw pgoutput messages of a real server, recorded from four slots that watch one history.

    plain              streaming off
    streamed           streaming on; every change of a transaction in progress is sent at once
    prepared           streaming off, two_phase
    streamed_prepared  streaming on, two_phase

    python -m tests.promises.bridge.recordings.record      records anew, on servers of its own

The file is gzipped JSON lines: first {"server_version", "contents"}, the tables at the end of the
history; then {"slot", "lsn", "data"} for every message in the order it came, data in hexadecimal.
"""

import contextlib
import gzip
import json
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from tests.promises.bridge.recordings import scenario

FILE = Path(__file__).with_name("pgoutput.jsonl.gz")
MARK = b"slotbridge_recorded"
_HEADER = struct.Struct("!cQQq")


class Recorded(NamedTuple):
    """One message and its WAL position."""

    lsn: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Recording:
    """The messages of each slot, and the tables' rows at the end (each value's text form)."""

    messages: dict[str, list[Recorded]]
    contents: dict[str, list[list[str | None]]]
    server_version: int


class SlotReader:
    """A replication connection that keeps what it receives, marks left out."""

    def __init__(self, conninfo: str, name: str, suffix: str, *, lsn: str) -> None:
        self.name = name
        self.received: list[Recorded] = []
        text = make_conninfo(conninfo, replication="database", options=scenario.STREAMED_ALWAYS)
        self._conn = pq.PGconn.connect(text.encode())
        options = "proto_version '4', publication_names 'recorded', messages 'true'"
        options += ", streaming 'on'" if "streamed" in name else ""
        options += ", two_phase 'on'" if "prepared" in name else ""
        command = f"START_REPLICATION SLOT {name}_{suffix} LOGICAL {lsn} ({options})"
        result = self._conn.exec_(command.encode())
        assert result.status == pq.ExecStatus.COPY_BOTH, self._conn.get_error_message()

    def read_to(self, mark: bytes) -> None:
        """Receive until the non-transactional message `mark` comes."""
        while True:
            _length, raw = self._conn.get_copy_data(0)
            data = bytes(raw)
            if data[:1] != b"w":
                continue
            lsn = _HEADER.unpack_from(data)[1]
            payload = data[_HEADER.size :]
            if payload[:1] == b"M" and MARK in payload:
                if payload.endswith(mark):
                    return
            else:
                self.received.append(Recorded(lsn, payload))

    def close(self) -> None:
        """End the connection."""
        self._conn.finish()


NAMES = ("plain", "streamed", "prepared", "streamed_prepared")


def record(conninfo: str, suffix: str) -> Recording:
    """Play the scenario in the empty database of `conninfo`; `suffix` makes slot names unique."""
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(psycopg.connect(conninfo, autocommit=True))
        scenario.prepare(writer)
        readers = []
        for name in NAMES:
            row = writer.execute(
                "SELECT lsn::text FROM pg_create_logical_replication_slot"
                "(%s, 'pgoutput', false, %s)",
                [f"{name}_{suffix}", "prepared" in name],
            ).fetchone()
            assert row is not None
            readers.append(SlotReader(conninfo, name, suffix, lsn=row[0]))
            stack.callback(readers[-1].close)
        marks = iter(range(1, 1_000))

        def drain() -> None:
            mark = b"mark %d." % next(marks)
            writer.execute(
                "SELECT pg_logical_emit_message(false, %s, %s, true)",
                [MARK.decode(), mark.decode()],
            )
            for reader in readers:
                reader.read_to(mark)

        scenario.play(conninfo, drain)
        return Recording(
            {reader.name: reader.received for reader in readers},
            scenario.contents(writer),
            writer.info.server_version,
        )


def save(recording: Recording, path: Path = FILE) -> None:
    """Write the file, the same bytes for the same recording."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        head = {"server_version": recording.server_version, "contents": recording.contents}
        file.write(json.dumps(head).encode() + b"\n")
        for slot, lsn, data in _lines(recording):
            line = {"slot": slot, "lsn": lsn, "data": data.hex()}
            file.write(json.dumps(line).encode() + b"\n")


def load(path: Path = FILE) -> Recording:
    """Read the file."""
    messages: dict[str, list[Recorded]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        head = json.loads(file.readline())
        for line in map(json.loads, file):
            item = Recorded(line["lsn"], bytes.fromhex(line["data"]))
            messages.setdefault(line["slot"], []).append(item)
    return Recording(messages, head["contents"], head["server_version"])


def _lines(recording: Recording) -> Iterator[tuple[str, int, bytes]]:
    for slot, messages in recording.messages.items():
        for lsn, data in messages:
            yield slot, lsn, data


def main() -> None:
    """Record anew."""
    from services.testbed.bed import Bed

    folder = Path(tempfile.mkdtemp(prefix="slotbridge-record-"))
    folder.chmod(0o755)
    with Bed(folder, lazy=True) as bed:
        bed.start("pair")
        save(record(bed.primary.conninfo(bed.dbname), "r"))


if __name__ == "__main__":
    main()
