"""The factory of bridges, as the bridge's own tests have it."""

from tests.promises.bridge.conftest import new_bridge

__all__ = ["new_bridge"]
