"""The SQL scripts, documents and examples that an installed package brings with it.

setup.py copies sql/, docs/ and examples/ of the checkout into this package when a wheel is built,
and the chart's dashboards into examples/. In a checkout they are read from where they are.
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
    if not (found := _files(kind)):
        raise SetupError(
            f"the package has no {kind} files",
            operation=f"read {kind}",
            hint="install slotbridge from its wheel, or run it in a checkout",
            exit_code=ExitCode.PROGRAM_MISSING,
        )
    return sorted(found)


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
    found = _files(kind)[known[stem]].read_text(encoding="utf-8")
    if kind == "sql":
        return _INCLUDE.sub(lambda match: text("sql", match[1]).rstrip("\n"), found)
    return found


def _files(kind: Kind) -> dict[str, Path]:
    """Return name -> file of all files of a kind."""
    here, ending = Path(__file__).parent, _ENDINGS[kind]
    checkout = here.parents[1]
    folders = {"": here / kind}
    if not (here / kind).is_dir():
        folders = {"": checkout / kind}
        if kind == "examples":
            folders["dashboards/"] = checkout / "helm" / "slotbridge" / "dashboards"
    return {
        prefix + path.relative_to(folder).as_posix().removesuffix(ending): path
        for prefix, folder in folders.items()
        for path in folder.rglob(f"*{ending}")
        if path.is_file() and "__pycache__" not in path.parts
    }
