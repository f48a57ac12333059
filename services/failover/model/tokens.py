"""The tokens by which an operator accepts a refusal of slotfailover (schemas.acceptance). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.acceptance import Kind, Token, of_bytes

if TYPE_CHECKING:
    from services.failover.model.destination import Destination
    from services.failover.model.view import Node


def lost_slot(system: str, slot: str, node: str) -> Token:
    """Return the token for a slot, or a part of its stream, that is lost on the primary `node`."""
    return Token(Kind.LOST_SLOT, slot, f"{node}@{system}")


def lost_wal(system: str, node: Node, lacking: int, kind: Kind = Kind.LOST_WAL) -> Token:
    """Return the token for the bytes of WAL that `node` lacks as it is promoted."""
    return Token(kind, f"{node.name}@{system}", of_bytes(node.received, lacking))


def is_off(system: str, node: str) -> Token:
    """Return the token for the word that a node without an answer is off."""
    return Token(Kind.IS_OFF, node, system)


def not_promoted(system: str, node: str, since: Destination | int) -> Token:
    """Return the token for the word that nobody promoted `node` beyond a timeline, or as led."""
    if not isinstance(since, int):
        since = since.met.timeline if since.met is not None else since.left
    return Token(Kind.NOT_PROMOTED, f"{node}@{system}", str(since))
