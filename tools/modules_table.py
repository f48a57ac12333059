"""The table of modules in the page of the architecture: the first line of each docstring."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs/why/architecture.md"
_SERVICES: Final = (ROOT / "services" / "bridge", ROOT / "services" / "adoption")
_BEGIN: Final = "<!-- modules: made from their docstrings by `make generate` -->\n"
_END: Final = "<!-- end of modules -->\n"
_SUMMARY: Final = re.compile(r'^r?"""(.+?)(?:"""|$)', re.MULTILINE)


def architecture_page() -> str:
    """Return the page with the table that the modules' docstrings give."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    assert after, f"{PAGE} lacks the marks around the table of modules"
    table = "\n".join(["| folder | module | what it is |", "|---|---|---|", *_rows()])
    return f"{before}{_BEGIN}{table}\n{_END}{after}"


def _rows() -> Iterator[str]:
    """Yield a row for each module that has a docstring: a folder's own, then its modules'."""
    for service in _SERVICES:
        files = [path for suffix in ("py", "pyx") for path in service.rglob(f"*.{suffix}")]
        shown = ""
        for path in sorted(files, key=lambda path: (path.parent, path.stem != "__init__", path)):
            summary = _SUMMARY.search(path.read_text(encoding="utf-8"))
            if summary is None:
                continue
            folder = f"`{path.parent.relative_to(ROOT)}/`"
            module = "" if path.stem == "__init__" else f"`{path.stem}`"
            text = summary[1].replace("|", "\\|")
            yield f"| {folder if folder != shown else ''} | {module} | {text} |"
            shown = folder
