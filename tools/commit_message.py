"""The hook commit-msg: refuses a subject, or a missing body, that CONTRIBUTING.md does not allow.

    python -m tools.commit_message FILE

It imports nothing of ours, and takes no time.
"""

import re
import sys
from pathlib import Path
from typing import Final

LENGTH_MAX: Final = 72
WITH_REASON: Final = ("feat", "fix", "perf", "refactor")
"""Kinds whose body says why."""
KINDS: Final = (*WITH_REASON, "test", "docs")
_SUBJECT: Final = re.compile(rf"({'|'.join(KINDS)}): \S.*[^.\s]")
_BY_GIT: Final = ("Merge ", 'Revert "', "fixup! ", "squash! ")
_CUT: Final = "# ------------------------ >8 ------------------------"


def problems(message: str) -> list[str]:
    """Return what is wrong with a commit message; comments and a diff below it don't count."""
    text = message.partition(_CUT)[0]
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("#")]
    subject, *body = "\n".join(lines).strip().split("\n")
    if subject.startswith(_BY_GIT):
        return []
    found = []
    kind = _SUBJECT.fullmatch(subject)
    if kind is None:
        found.append(f"begin with {', '.join(KINDS)} and `: `, and end without a full stop")
    if len(subject) > LENGTH_MAX:
        found.append(f"the subject has {len(subject)} characters; at most {LENGTH_MAX}")
    if body and body[0]:
        found.append("leave the second line empty")
    if kind is not None and kind[1] in WITH_REASON and not any(body):
        found.append(f"say in the body why: a {kind[1]} needs a reason")
    return found


def main() -> int:
    """Print what is wrong with the message in the file; return 1 if anything is."""
    found = problems(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.stderr.write("".join(f"commit message: {problem}\n" for problem in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
