"""The key of a table whose replica identity is not its key (FULL, NOTHING). Pure.

pgoutput does not say which columns are the primary key then, and the catalog says what it is today,
which may be long after the change that is being decoded. What is certain:

    the table is gone                  as last published: it had that key while it was published
    the key's index is as old as the   the primary key of today; by the names last published when a
    table or precedes the change       column was renamed since
    otherwise (made meanwhile)         the primary key, if that is what was last published

In every other case the table has no key: an event without one is right for every consumer, with its
whole old row under FULL; one with the key of another time could make two rows one.
"""

from collections.abc import Collection
from typing import Final

from schemas.errors import SettingsError
from services.bridge.events.values.datetimes import in_milliseconds
from services.bridge.events.values.encoders import Encoders
from services.bridge.pgoutput.messages import Relation
from services.postgres.publications import PrimaryKey

_XIDS: Final = 2**32
_CUT: Final = ("time", "timestamp")


def key_columns(
    columns: Collection[str], xid: int, primary_key: PrimaryKey | None, last: Collection[str]
) -> frozenset[str]:
    """Return the key of a table with `columns` in transaction `xid`, empty if none is certain.

    `primary_key`: the catalog's, None for a table that is gone. `last`: the key last published.
    """
    if primary_key is None:
        key = frozenset(last)
    elif settled(xid, primary_key):
        key = frozenset(primary_key.columns)
        if len(key) == len(last) and not key <= frozenset(columns):
            key = frozenset(last)
    else:
        key = frozenset(primary_key.columns) & frozenset(last)
        if len(key) != len(primary_key.columns):
            key = frozenset()
    return key if key <= frozenset(columns) else frozenset()


def settled(xid: int, primary_key: PrimaryKey | None) -> bool:
    """Tell whether later transactions get the same answer, unless the table is described anew."""
    if (
        primary_key is None
        or not primary_key.columns
        or primary_key.made_by == primary_key.table_made_by
    ):
        return True
    # Made after `xid`: among the xids that were given out since. Transaction ids are circular.
    return not 0 < (primary_key.made_by - xid) % _XIDS < (primary_key.next_xid - xid) % _XIDS


def require_distinct_keys(relation: Relation, encoders: Encoders) -> None:
    """Raise SettingsError if two keys of a table would become one, as the settings write them."""
    if encoders.settings.time_precision != "connect":
        return
    for column in (one for one in relation.columns if one.key):
        found, typmod = encoders.base(column.type_oid, column.typmod)
        if found is not None and found.name in _CUT and not in_milliseconds(typmod):
            raise SettingsError(
                f"column {column.name} of the key of {relation.schema}.{relation.table} has "
                "microseconds, which bridge.time_precision: connect cuts: two keys may become one",
                operation="describe a table",
                subject="bridge.time_precision",
                hint="choose another bridge.time_precision, or a key without that column "
                "(shaping.keys)",
            )
