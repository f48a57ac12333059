"""What `slottables` makes of a run's topics, row by row against the database that survived."""

import os
from pathlib import Path
from typing import Final

from services.testbed.java import find_java_home
from tests.promises.bridge.running import Bridge
from tests.promises.tables.drill import VERIFY, Slottables, report_of
from tests.promises.tables.one_java import run_all
from tests.torture.bank import SHAPING
from tests.torture.checker import Finding

TABLES: Final = ("ledger", "account", "item", "whole", "scratch")
"""Not `shape`: a column's default for the rows that were there is in no event."""
RESTORABLE: Final = "ALTER TABLE item REPLICA IDENTITY FULL;"
"""Else a changed key may leave out a large value, and `slottables` stops with that very hint."""
_IDLE_S: Final = "5"


def compare_tables(bridge: Bridge, conninfo: str, folder: Path) -> tuple[int, list[Finding]]:
    """Fill Iceberg tables from Kafka; how many rows they have, and which tables differ."""
    os.environ.setdefault("JAVA_HOME", str(find_java_home()))
    source = {"conninfo": conninfo, "publication": bridge.publication}
    names = [f"public.{table}" for table in TABLES]
    servers = bridge.kafka.bootstrap_servers
    slottables = Slottables(folder, source, servers, bridge.prefix, names, shaping=SHAPING)
    filled, *verified = run_all(slottables.config, ("run", "--until-idle", _IDLE_S), VERIFY)
    if filled.code:
        return 0, [Finding("wrong", f"slottables run: {filled.log[-1500:]}")]
    report = report_of(*verified)["tables"]
    missing = set(names) - {table["table"] for table in report}
    found = [Finding("wrong", f"no Iceberg table of {name}") for name in sorted(missing)]
    found += [Finding("wrong", f"Iceberg: {table}") for table in report if not table["equal"]]
    return sum(table["table_rows"] for table in report), found
