"""The positions that bridges note on a node: replication origins, or sequences of this database."""

import psycopg

from services.postgres.origins import read_origins
from services.postgres.server import Connection
from services.postgres.witness_sequences import read_sequences


def read_positions(connection: Connection, slot: str) -> dict[str, int] | None:
    """Return the origins' positions, with that of the bridge's sequence as its origin's.

    None where they are hidden from our role: a witness more, not one that is needed; it is said
    that it was not asked. The sequence (source.witness) is seen in the connected database alone.
    """
    origin, sequences = f"slotbridge_{slot}", read_sequences(connection)
    try:
        found = read_origins(connection)
    except psycopg.errors.InsufficientPrivilege:
        if sequences.get(slot) is None:
            return None
        found = {}
    if slot in sequences:
        position = sequences[slot]
        if position is None:
            return None
        found[origin] = max(position, found.get(origin, 0))
    return found
