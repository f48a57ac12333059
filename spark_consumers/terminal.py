"""Parts that all commands share: options, lines on stdout, exit codes, signals."""

import contextlib
import json
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Annotated

import structlog
import typer

from schemas.errors import ExitCode, SettingsError, SetupError, SlotbridgeError
from schemas.lsn import parse_lsn
from schemas.settings import KafkaSettings, Settings, require

_OF_SPARK = frozenset({"numpy", "py4j", "pyarrow", "pyroaring", "pyspark"})
"""The packages of the extra `spark`."""
_SIGNALLED = 128
"""Exit codes of a process that a signal has ended begin behind it, as those of shells do."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines on stdout.")]


def readable(settings: Settings) -> KafkaSettings:
    """Return the section `kafka`. Raise SettingsError for records that the tables can't read."""
    kafka = require(settings.kafka, "kafka")
    if kafka.cloudevents == "structured":
        raise SettingsError(
            "slottables reads no structured CloudEvents, and kafka.cloudevents is structured",
            operation="read settings",
            subject=f"topics {kafka.topic_prefix}.*",
            hint="set kafka.cloudevents to binary, or give readers of structured CloudEvents a "
            "bridge of their own, with another slot and topic prefix",
        )
    return kafka


def write_line(line: str) -> None:
    """Write a line to stdout at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set; a second signal of either kills the process."""
    stop = threading.Event()

    def handle(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return stop


def read_lsn(text: str) -> int:
    """Read an LSN such as 0/16B3748. Raise SettingsError for other texts."""
    try:
        return parse_lsn(text)
    except ValueError as error:
        raise SettingsError(
            str(error), operation="read the command line", hint="--as-of 0/16B3748"
        ) from None


@contextlib.contextmanager
def exit_codes(*, as_json: bool) -> Iterator[None]:
    """Log to stderr; turn every failure into one line there and its exit code.

    An exception that nobody expects is a bug: its traceback comes first, and the code is 70. Code 1
    is left to commands that have found a difference.
    """
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
    try:
        with _packages():
            yield
    except KeyboardInterrupt:
        raise SystemExit(_SIGNALLED + signal.SIGINT) from None
    except BrokenPipeError:  # nobody reads stdout any more, as after `| head`
        raise SystemExit(_SIGNALLED + signal.SIGPIPE) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("click", "typer"):
            raise  # the command line's own way to end
        failure = _failure(error)
        if failure is None:
            traceback.print_exc()
            failure = SlotbridgeError(
                f"internal error: {type(error).__name__}",
                hint="this is a bug in slotbridge; please report it with the traceback above",
            )
        if as_json:
            fields = ("operation", "subject", "lsn", "hint")
            document = {"error": failure.message} | {n: getattr(failure, n) for n in fields}
            write_line(json.dumps(document | {"exit_code": int(failure.exit_code)}))
        sys.stderr.write(f"error: {failure}\n")
        raise SystemExit(int(failure.exit_code)) from None


def _failure(error: Exception) -> SlotbridgeError | None:
    """Return the error that tells an operator of `error`, None where that is a bug."""
    if isinstance(error, SlotbridgeError):
        return error
    try:
        from spark_consumers.failures import expected  # it needs Spark, which may be missing
    except ModuleNotFoundError:
        return None
    return expected(error, "run slottables")


def interval_seconds(text: str) -> float:
    """Read a time such as 90s, 15m or 1h; 0 for an empty text. Raise SettingsError for others."""
    match = re.fullmatch(r"([0-9]+)([smh])", text)
    if text and match is None:
        raise SettingsError(
            f"{text!r} is not a time", operation="read the command line", hint="--repeat 1h"
        )
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0


@contextlib.contextmanager
def _packages() -> Iterator[None]:
    """Raise SetupError (PROGRAM_MISSING) for a package of the extra `spark` that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _OF_SPARK:
            raise
        raise SetupError(
            f"the Python package {name} is not installed",
            operation="start slottables",
            hint="pip install 'slotbridge[spark]'",
            exit_code=ExitCode.PROGRAM_MISSING,
        ) from None
