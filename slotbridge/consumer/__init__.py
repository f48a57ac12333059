"""Reads whole source transactions in the order of their commits (docs/guides/consumers.md).

    with Transactions("kafka:9092", "shop", position=Position.parse(stored)) as transactions:
        for transaction in transactions:
            with database.transaction():             # the caller's own store
                apply(transaction.events)
                store(transaction.position.text())   # together with what was applied

What is stored with the position of its transaction is applied exactly once, whatever is killed.
"""

from slotbridge.consumer.assembly import Change, Refused, Transaction
from slotbridge.consumer.position import Position
from slotbridge.consumer.transactions import Transactions
from slotbridge.consumer.wait import wait_for

__all__ = ["Change", "Position", "Refused", "Transaction", "Transactions", "wait_for"]
