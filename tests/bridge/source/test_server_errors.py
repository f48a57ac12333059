"""Each error's exit code says who has to act: 10-19 nobody, a supervisor starts it again."""

import ast
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from schemas.errors import ExitCode, Retryable, SetupError
from services.bridge.source.server_errors import READ_THE_STREAM, connect_error, server_error

ROOT = Path(__file__).parents[3]
PASSING = range(10, 20)
WAITS_FOR_OTHER_HOSTS = ("services/bridge/progress/consistency.py", "TIMELINE")
"""An old primary: other hosts are tried until the deadline, then an operator has to say why."""


def raised() -> Iterator[tuple[str, str, ExitCode]]:
    """(module, error class, exit code) of each error that is made with a code of its own."""
    for folder in ("services/bridge", "services/kafka"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                    continue
                for keyword in node.keywords:
                    value = keyword.value
                    if keyword.arg == "exit_code" and isinstance(value, ast.Attribute):
                        code = ExitCode.__members__.get(value.attr)
                        if code is not None:
                            yield str(path.relative_to(ROOT)), node.func.id, code


def test_a_retryable_error_has_a_code_to_retry_and_no_other_has() -> None:
    found = list(raised())
    assert len(found) > 20
    wrong = [
        (module, kind, code.name)
        for module, kind, code in found
        if (kind in ("Retryable", "RefusalLearned", "TransactionHangs")) is not (code in PASSING)
        and (module, code.name) != WAITS_FOR_OTHER_HOSTS
    ]
    assert not wrong


@pytest.mark.parametrize(
    "state", ["08006", "40001", "40P01", "53200", "53300", "55006", "55P03", "57014", "57P01"]
)
def test_passing_server_error_is_retried(state: str) -> None:
    error = server_error(state, "what it says", "read the slot", "slot s")
    assert isinstance(error, Retryable)
    assert error.exit_code in PASSING


@pytest.mark.parametrize("state", ["42501", "42704", "42P01", "53100", "55000", "58P01", "22P02"])
def test_lasting_server_error_is_not_retried(state: str) -> None:
    error = server_error(state, "what it says", "read the slot", "slot s")
    assert isinstance(error, SetupError)
    assert error.exit_code >= 20


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            "22023",
            'replication slot "b" specified in parameter "synchronized_standby_slots" does not '
            "exist",
        ),
        (
            "22023",
            'cannot specify logical replication slot "b" in parameter "synchronized_standby_slots"',
        ),
        (
            "55000",
            'physical replication slot "b" specified in parameter "synchronized_standby_slots" has '
            "been invalidated",
        ),
        (
            "55000",
            'replication slot "b" specified in parameter "synchronized_standby_slots" does not '
            "have active_pid",
        ),
    ],
)
def test_a_primary_that_shuts_down_while_it_awaits_a_standby_is_retried(
    state: str, message: str
) -> None:
    """Source: slot.c, StandbySlotsHaveCaughtup; walsender.c, NeedToWaitForStandbys."""
    error = server_error(state, message, READ_THE_STREAM, "slot s")
    assert isinstance(error, Retryable)
    assert error.exit_code in PASSING
    shuts_down = "the primary is shutting down while it waits for the standby of slot b: "
    assert error.message == shuts_down + message
    assert "synchronized_standby_slots" in error.hint
    lasting = server_error(state, message, "run ALTER", "slot s")
    assert isinstance(lasting, SetupError)


def test_a_message_that_repeats_a_rows_value_is_left_to_the_servers_log() -> None:
    text = 'invalid input syntax for type integer: "Zq9-rowsecret-1"'
    error = server_error("22P02", text, "read rows", "public.t")
    assert "rowsecret" not in str(error)
    assert "22P02" in error.message


REFUSED = "connection to server at 127.0.0.1, port 5432 failed: "


def refusal(state: str | None, text: str) -> Exception:
    """What services.postgres.sessions raises where a connection can't be made."""
    error = psycopg.OperationalError(REFUSED + text)
    error.sqlstate = state
    return error


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("57P03", "FATAL:  the database system is starting up"),
        ("57P03", "ВАЖНО:  система баз данных запускается"),
        ("57P03", "FATAL:  the database system is not accepting connections"),
        ("57P03", "FATAL:  the database system is in recovery mode"),
        ("53300", "FATAL:  sorry, too many clients already"),
        ("53300", "FATAL:  remaining connection slots are reserved for roles with …"),
        ("57P01", "FATAL:  terminating connection due to administrator command"),
        (None, "Connection refused"),
        (None, 'could not translate host name "pg-a" to address: Temporary failure'),
    ],
)
def test_a_refused_connection_that_may_be_taken_later_is_retried(
    state: str | None, text: str
) -> None:
    assert connect_error(refusal(state, text), "slot s").exit_code in PASSING


@pytest.mark.parametrize("state", ["58P01", "58030", "XX001", "F0000", "54000", "53100", "53400"])
def test_a_connection_that_no_list_names_is_tried_again(state: str) -> None:
    """Another server may answer there soon."""
    error = connect_error(refusal(state, "FATAL: could not open file"), "slot s")
    assert isinstance(error, Retryable)
    assert error.exit_code in PASSING


@pytest.mark.parametrize(
    ("state", "text", "hint"),
    [
        ("28P01", 'FATAL:  password authentication failed for user "b"', "the password"),
        ("28P01", 'ВАЖНО:  пользователь "b" не прошёл проверку подлинности', "the password"),
        ("55000", 'FATAL:  database "bank" is not currently accepting', "ALLOW_CONNECTIONS"),
        ("3D000", 'FATAL:  データベース"bank"は存在しません', "create the database"),
        ("28000", 'FATAL:  role "bridge" is not permitted to log in', "create the role"),
        ("28000", "FATAL:  no pg_hba.conf entry for replication connection", "in pg_hba.conf"),
        ("42704", 'FATAL:  unrecognized configuration parameter "x"', "the options"),
        (None, "SSL error: certificate verify failed", "sslrootcert"),
        (None, "SSL error: tlsv1 alert unknown ca", "sslcert"),
        (None, "SSL error: sslv3 alert certificate expired", "sslcert"),
        (None, "fe_sendauth: no password supplied", "give a password"),
    ],
)
def test_a_connection_that_will_always_be_refused_is_not_retried(
    state: str | None, text: str, hint: str
) -> None:
    """Whatever the server's language: its SQLSTATE decides."""
    error = connect_error(refusal(state, text), "slot s")
    assert isinstance(error, SetupError)
    assert hint in error.hint
