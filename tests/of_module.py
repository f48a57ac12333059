"""Run the tests of one module of the product.

    python -m tests.of_module services/bridge/sink/topics.py [pytest's options]

These are the file of the module's name (tests/bridge/sink/test_topics.py) and all files of tests
that import the module themselves.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PRODUCT: Final = ("schemas", "services", "slotbridge", "spark_consumers")


def main(arguments: list[str]) -> int:
    """Run the tests of the module that the first argument names; return pytest's exit code."""
    module = Path(arguments[0].replace(".", "/").removesuffix("/py")).with_suffix(".py")
    if module.parts[0] not in PRODUCT or not (ROOT / module).is_file():
        sys.stderr.write(f"{module} is not a module of the product\n")
        return 2
    files = tests_of(module)
    if not files:
        sys.stderr.write(f"no file of tests has the name of {module}, or imports it\n")
        return 5
    command = [sys.executable, "-m", "pytest", *map(str, files), *arguments[1:]]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def own_file(module: Path) -> Path:
    """Return where the tests of a module alone are: services/a/b.py -> tests/a/test_b.py."""
    folders = module.parent.parts[1 if module.parts[0] == "services" else 0 :]
    return Path("tests", *folders, f"test_{module.stem}.py")


def tests_of(module: Path) -> list[Path]:
    """Return the module's own file, if there is one, then the files that import the module."""
    own = own_file(module)
    name = ".".join(module.with_suffix("").parts)
    found = [own] if (ROOT / own).is_file() else []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = path.relative_to(ROOT)
        if file != own and name in _imports(path.read_text(encoding="utf-8")):
            found.append(file)
    return found


def _imports(source: str) -> set[str]:
    return set(_names(ast.parse(source)))


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
