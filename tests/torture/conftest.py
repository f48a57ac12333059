"""The bed of the failover tests: embedded servers, whoever provides the other tests."""

from tests.promises.failover.conftest import local_bed

__all__ = ["local_bed"]
