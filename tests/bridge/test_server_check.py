"""Which servers the bridge refuses, by version."""

from dataclasses import replace

import pytest

from schemas.errors import ExitCode, SetupError
from services.bridge.postgres.database import check_server
from services.slots import read_server
from tests.providers.databases import connect
from tests.providers.interface import Provider


def test_a_server_before_17_5_is_refused_by_name(pair: Provider) -> None:
    with connect(pair.primary) as connection:
        server = read_server(connection)
    check_server(server)
    check_server(replace(server, version=170005))
    for version, name in ((170004, r"17\.4"), (170000, r"17\.0"), (160010, r"16\.10")):
        with pytest.raises(SetupError, match=f"PostgreSQL {name} is too old") as error:
            check_server(replace(server, version=version))
        assert error.value.exit_code is ExitCode.SERVER_VERSION
        assert "17.5" in error.value.hint


def test_two_phase_needs_18(oldest_pair: Provider) -> None:
    with connect(oldest_pair.primary) as connection:
        server = read_server(connection)
    check_server(server)
    with pytest.raises(SetupError, match=r"PostgreSQL 17 can lose prepared") as error:
        check_server(server, two_phase=True)
    assert error.value.exit_code is ExitCode.SERVER_VERSION
