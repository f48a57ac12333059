"""C functions of the libraries that Python's drivers have loaded, for the C extension."""

import ctypes
from types import ModuleType


def address(module: ModuleType, function: str) -> int:
    """Return the address of a function in a library that `module` is linked to, 0 if not found.

    It is not found where the module is not C's, or has the library linked in statically.
    """
    try:
        found = ctypes.CDLL(module.__file__)[function]
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0
