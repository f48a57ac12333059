"""The bridges of these tests."""

from tests.promises.bridge.conftest import new_bridge

__all__ = ["new_bridge"]
