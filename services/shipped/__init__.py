"""The SQL scripts, documents and examples that an installed package brings with it.

setup.py copies sql/, docs/ and examples/ of the checkout into this package when a wheel is built.
In a checkout, where nothing is copied, they are read from where they are.
"""

import re
from pathlib import Path
from typing import Final, Literal

from schemas.errors import ExitCode, SettingsError, SetupError

Kind = Literal["sql", "docs", "examples"]
_ENDINGS: Final[dict[Kind, str]] = {"sql": ".sql", "docs": ".md", "examples": ""}
"""Endings that names are without; examples have several, and none."""
_INCLUDE: Final = re.compile(r"^\\ir (\S+)\.sql$", re.MULTILINE)


def names(kind: Kind) -> list[str]:
    """Return the names of all files of a kind. Raise SetupError if there are none."""
    folder, ending = _folder(kind), _ENDINGS[kind]
    found = sorted(
        path.relative_to(folder).as_posix().removesuffix(ending)
        for path in folder.rglob(f"*{ending}")
        if path.is_file() and "__pycache__" not in path.parts
    )
    if not found:
        raise SetupError(
            f"the package has no {kind} files",
            operation=f"read {kind}",
            hint="install slotbridge from its wheel, or run it in a checkout",
            exit_code=ExitCode.PROGRAM_MISSING,
        )
    return found


def text(kind: Kind, name: str) -> str:
    r"""Return one file. A script's `\ir` lines are replaced by the file that they name.

    `name`: with or without the file's suffix and its folder. Raise SettingsError when there is no
    such file.
    """
    known = {known.lower(): known for known in names(kind)}
    stem = name.removesuffix(_ENDINGS[kind]).lower()
    stem = stem.replace("-", "_") if kind == "sql" else stem
    alike = [one for one in known if stem in (one.rpartition(".")[0], one.rpartition("/")[2])]
    if stem not in known and len(alike) == 1:
        stem = alike[0]
    if stem not in known:
        raise SettingsError(
            f"there is no {kind} file {name}",
            operation=f"read {kind}",
            hint=f"choose one of {', '.join(known.values())}",
        )
    found = (_folder(kind) / f"{known[stem]}{_ENDINGS[kind]}").read_text(encoding="utf-8")
    if kind == "sql":
        return _INCLUDE.sub(lambda match: text("sql", match[1]).rstrip("\n"), found)
    return found


def _folder(kind: Kind) -> Path:
    here = Path(__file__).parent
    inside = here / kind
    return inside if inside.is_dir() else here.parents[1] / kind
