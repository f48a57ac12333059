"""Builds the compiled part (services/bridge/compiled); without a C compiler all goes without it.

Each module knows the digest of all sources: one that is older is not used. So all are built anew.
"""

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup

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

setup(ext_modules=modules, options={"build_ext": {"force": True, "parallel": os.cpu_count()}})
