"""The hook for commit messages takes those that CONTRIBUTING.md allows, and no others."""

import pytest

from tools.commit_message import problems


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("test: compare rows of two partitions\n", ""),
        ("fix: end a wait at its deadline\n\nIt went on for good.\n", ""),
        ("docs: name the module\n# Please enter the commit message\n", ""),
        ("Merge branch 'a'\n", ""),
        ('Revert "feat: all of it"\n', ""),
        ("fix: end a wait at its deadline\n# The body is a comment.\n", "say in the body why"),
        ("fix: end a wait\n# ------------------------ >8 ------------------------\n+a\n", "say in"),
        ("feat: " + "x" * 67 + "\n\nWhy.\n", "73 characters"),
        ("end a wait at its deadline\n", "begin with"),
        ("fix : end a wait\n\nWhy.\n", "begin with"),
        ("docs: name the module.\n", "full stop"),
        ("docs: name the module\nat once\n", "second line"),
        ("", "begin with"),
    ],
)
def test_a_message_is_taken_or_its_problem_named(message: str, problem: str) -> None:
    found = problems(message)
    assert len(found) == bool(problem)
    assert problem in "".join(found)
