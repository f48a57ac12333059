"""The table of breakers in docs/reference/checks.md is that of the checks and of the tests."""

import re
from pathlib import Path

from services.failover.checks.registry import CHECKS

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[2] / "docs/reference/checks.md"


def test_every_check_is_in_the_table_with_a_test() -> None:
    text = DOCUMENT.read_text(encoding="utf-8").split("## Breakers, checks, tests")[1]
    rows = [line.split("|")[1:4] for line in text.split("\n## ")[0].splitlines() if line[:1] == "|"]
    tests = {
        name
        for path in HERE.parents[1].rglob("failover/**/test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    named = [re.findall("`([^`]+)`", row[1]) for row in rows[2:]]
    assert {name for names in named for name in names} == {check.name for check in CHECKS}
    for row in rows[2:]:
        found = set(re.findall("`(test_[^`]+)`", row[2]))
        assert found, row
        assert found <= tests, row
