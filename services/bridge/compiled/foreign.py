"""C functions of the libraries that Python's drivers have loaded, for the C extension."""

import ctypes
from types import ModuleType


def address(module: ModuleType, function: str) -> int:
    """Where the function of a library that `module` is linked to is; 0: not found.

    It is not where the module is not C's, or has swallowed the library.
    """
    try:
        found = ctypes.CDLL(module.__file__)[function]
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0
