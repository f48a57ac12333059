"""Keeps a copy of pgbench's accounts in SQLite, exactly once: rows and position in one commit.

python examples/consumer.py kafka:9092 PREFIX copy.sqlite [LSN]

With an LSN, such as 0/1A2B3C, it makes a copy as of there, and ends.
"""

import sqlite3
import sys

from slotbridge.consumer import Position, Transactions


def main(bootstrap_servers: str, prefix: str, path: str, until: str | None = None) -> None:
    """Follow the table until Ctrl-C, or up to `until`; run it again to go on where it was."""
    store = sqlite3.connect(path, isolation_level=None)
    store.execute("CREATE TABLE IF NOT EXISTS accounts (aid INTEGER PRIMARY KEY, balance INTEGER)")
    store.execute("CREATE TABLE IF NOT EXISTS progress (id INTEGER PRIMARY KEY, position TEXT)")
    row = store.execute("SELECT position FROM progress").fetchone()
    position = Position.parse(row[0] if row else None)
    tables = ["public.pgbench_accounts"]
    reader = Transactions(bootstrap_servers, prefix, position=position, until=until, tables=tables)
    with reader as transactions:
        for transaction in transactions:
            store.execute("BEGIN")
            for event in transaction.events:
                if event.op == "t":
                    store.execute("DELETE FROM accounts")
                elif event.op == "d":
                    store.execute("DELETE FROM accounts WHERE aid = ?", [event.key["aid"]])
                else:
                    account = event.value["after"]
                    store.execute(
                        "INSERT OR REPLACE INTO accounts VALUES (?, ?)",
                        [account["aid"], account["abalance"]],
                    )
            store.execute(
                "INSERT OR REPLACE INTO progress VALUES (1, ?)", [transaction.position.text()]
            )
            store.execute("COMMIT")


if __name__ == "__main__":
    main(*sys.argv[1:5])
