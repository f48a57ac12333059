"""What `make release` puts into dist/: all that a release of the version in pyproject.toml has.

    sdist                        slotbridge-VERSION.tar.gz
    wheels                       one for each supported Python that this machine has
    chart                        slotbridge-chart-VERSION.tgz, with the version as appVersion
    bill of materials            slotbridge-VERSION.cdx.json: the locked packages (CycloneDX)
    notes.md                     the version's part of CHANGELOG.md, and what was not built
    SHA256SUMS                   of all of these

It builds nothing for a Python that is not on the machine, and no image: the notes name both.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tools.generate import CHART, version
from tools.helm import NoGoError, helm_program
from tools.interpreters import OLDEST, UNTRIED, Version, folders, interpreters, text

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "dist"
WORK: Final = ROOT / ".cache/release"
IMAGES: Final = ("bridge", "failover", "tables")


class NotReady(Exception):
    """A release that can't be made now, and why."""


def main() -> int:
    """Build the release; return 1 with the reason on the standard error output if it can't be."""
    try:
        release(version())
    except (NotReady, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"make release: {error}\n")
        return 1
    return 0


def release(number: str) -> None:
    """Build everything into dist/, the sums last. Raise NotReady, CalledProcessError."""
    changes = changes_of(number, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if output("git", "status", "--porcelain"):
        raise NotReady("the checkout has changes; commit them")
    pythons = of_each_minor(interpreters(folders(os.environ, Path.home()))[0])
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    for built, path in pythons.items():
        wheel(built, path)
    missing = [f"wheel for Python {text(one)}" for one in supported() if one not in pythons]
    missing += [] if chart(number) else ["chart (helm is built with Go, which is missing)"]
    bill_of_materials(number)
    missing += [f"image `{name}`: {image_command(name, number)}" for name in IMAGES]
    (FOLDER / "notes.md").write_text(notes(number, changes, missing), encoding="utf-8")
    (FOLDER / "SHA256SUMS").write_text(sums(FOLDER), encoding="ascii")
    sys.stdout.write("".join(f"{path.name}\n" for path in sorted(FOLDER.iterdir())))
    sys.stdout.write("".join(f"not built: {what}\n" for what in missing))


def changes_of(number: str, changelog: str) -> str:
    """Return the changelog's part about a version. Raise NotReady without one, or unreleased."""
    parts = re.split(r"^## (.+)\n", changelog, flags=re.MULTILINE)[1:]
    named = dict(zip(parts[::2], parts[1::2], strict=True))
    if "Unreleased" in named:
        raise NotReady("CHANGELOG.md has changes under `Unreleased`; give them the version's name")
    if number not in named:
        raise NotReady(f"CHANGELOG.md has nothing about {number}")
    return named[number].strip()


def supported() -> list[Version]:
    """Return the versions of Python that requires-python allows, such as (3, 11)."""
    return [(3, minor) for minor in range(OLDEST[1], UNTRIED[1])]


def of_each_minor(usable: dict[Version, Path]) -> dict[Version, Path]:
    """Return an interpreter of each supported minor version, its latest patch release."""
    return {found[:2]: path for found, path in sorted(usable.items()) if found[:2] in supported()}


def wheel(built: Version, path: Path) -> None:
    """Build sdist and wheel by `make dist` with that Python, in folders of their own."""
    place = WORK / text(built)
    inside = place.relative_to(ROOT)  # the Makefile puts the checkout's folder before it
    variables = (f"PYTHON={path}", f"DIST={inside}", f"DIST_TO={inside}/dist")
    make = os.environ.get("MAKE", "make")
    subprocess.run([make, "--no-print-directory", "dist", *variables], cwd=ROOT, check=True)
    for made in (place / "dist").iterdir():
        shutil.move(made, FOLDER / made.name)


def chart(number: str) -> bool:
    """Package the chart; return False where helm is not there and can't be built."""
    try:
        helm = helm_program()
    except NoGoError:
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = [str(helm), "package", str(CHART), "--version", number, "--app-version", number]
        subprocess.run([*command, "--destination", folder], check=True, capture_output=True)
        (made,) = Path(folder).iterdir()
        shutil.move(made, FOLDER / f"slotbridge-chart-{number}.tgz")
    return True


def bill_of_materials(number: str) -> None:
    """List the packages of requirements/run.txt with their hashes, as CycloneDX."""
    place = WORK / "sbom"
    if not (place / "bin/cyclonedx-py").exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        locked = ["--quiet", "--no-deps", "--require-hashes", "-r", "requirements/sbom.txt"]
        pip = [str(place / "bin/pip"), "install", "--disable-pip-version-check"]
        subprocess.run([*pip, *locked], cwd=ROOT, check=True)
    options = ["--output-reproducible", "--of", "JSON", "--pyproject", "pyproject.toml"]
    target = FOLDER / f"slotbridge-{number}.cdx.json"
    command = [str(place / "bin/cyclonedx-py"), "requirements", *options, "-o", str(target)]
    subprocess.run([*command, "requirements/run.txt"], cwd=ROOT, check=True, capture_output=True)


def image_command(name: str, number: str) -> str:
    """Return the command by which a person builds an image."""
    revision = output("git", "rev-parse", "HEAD")
    labels = f"--build-arg VERSION={number} --build-arg REVISION={revision}"
    return f"docker build --target {name} {labels} -t slotbridge-{name}:{number} ."


def notes(number: str, changes: str, missing: list[str]) -> str:
    """Return the release notes."""
    left = "".join(f"- {what}\n" for what in missing)
    return f"# Slotbridge {number}\n\n{changes}\n\n## Not built\n\n{left}"


def sums(folder: Path) -> str:
    """Return the lines of SHA256SUMS, as `sha256sum --check` reads them."""
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
    )


def output(*command: str) -> str:
    """Return what a command prints in the checkout."""
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
