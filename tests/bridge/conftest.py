"""Both ways of rows: compiled and plain."""

import shutil
from collections.abc import Iterator

import pytest

from services.bridge import compiled

CAN_COMPILE = compiled.engine is not None or shutil.which("cc") is not None
"""Without a compiler there is one way only, and it is tested."""
COMPILED = pytest.mark.skipif(not CAN_COMPILE, reason="no C compiler, and nothing compiled")


@pytest.fixture(scope="module", params=["compiled", "plain"] if CAN_COMPILE else ["plain"])
def twin(request: pytest.FixtureRequest) -> Iterator[str]:
    """Once with the compiled way of rows, once without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain":
            patch.setattr(compiled, "engine", None)
        else:
            assert compiled.engine is not None, "not built: see setup.py"
        yield request.param
