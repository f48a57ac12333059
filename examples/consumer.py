"""Keeps a copy of pgbench's accounts in SQLite, exactly once: rows and position in one commit.

python examples/consumer.py kafka:9092 PREFIX copy.sqlite
"""

import sqlite3
import sys

from slotbridge.consumer import Position, Transactions


def main(bootstrap_servers: str, prefix: str, path: str) -> None:
    """Follow the table until Ctrl-C; run it again to go on where it was."""
    store = sqlite3.connect(path, isolation_level=None)
    store.execute("CREATE TABLE IF NOT EXISTS accounts (aid INTEGER PRIMARY KEY, balance INTEGER)")
    store.execute("CREATE TABLE IF NOT EXISTS progress (id INTEGER PRIMARY KEY, position TEXT)")
    row = store.execute("SELECT position FROM progress").fetchone()
    position = Position.parse(row[0] if row else None)
    tables = ["public.pgbench_accounts"]
    with Transactions(bootstrap_servers, prefix, position=position, tables=tables) as transactions:
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
    main(*sys.argv[1:4])
