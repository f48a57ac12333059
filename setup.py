"""Builds the compiled part (services/bridge/compiled); without a C compiler all goes without it.

A wheel gets copies of sql/, docs/, examples/ and the chart's dashboards inside services/shipped,
for the commands of these names.
Each module knows the digest of all sources: one that is older is not used. So all are built anew.
"""

import os
import runpy
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOM = Path("services/bridge/compiled")

try:
    from Cython.Build import cythonize
except ImportError:
    modules = []
else:
    digest = runpy.run_path(str(ROOM / "sources.py"))["digest"]()
    sources = [
        Extension(
            ".".join(path.with_suffix("").parts),
            [str(path)],
            optional=True,
            extra_compile_args=["-O3", "-g0"],
            define_macros=[("SOURCES_DIGEST", f'"{digest}"')],
        )
        for path in sorted(ROOM.glob("*.pyx"))
    ]
    modules = cythonize(sources, build_dir="build", force=True)


class BuildWithShippedFiles(build_py):
    """Copies what services.shipped reads, except into a checkout, which has the originals."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder, ending, kind in (
            ("sql", ".sql", "sql"),
            ("docs", ".md", "docs"),
            ("examples", "", "examples"),
            ("helm/slotbridge/dashboards", ".json", "examples/dashboards"),
        ):
            for file in Path(folder).rglob(f"*{ending}"):
                if file.is_file() and "__pycache__" not in file.parts:
                    shipped = Path(self.build_lib, "services/shipped", kind)
                    target = shipped / file.relative_to(folder)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, target)


setup(
    cmdclass={"build_py": BuildWithShippedFiles},
    ext_modules=modules,
    options={"build_ext": {"force": True, "parallel": os.cpu_count()}},
)
