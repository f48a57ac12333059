"""What Spark says of a lost executor is never taken for a bad value: pure."""

import pytest
from pyspark.errors import PySparkException

from schemas.errors import ExitCode, Retryable, SlotbridgeError
from spark_consumers.epochs.parking import own_fault
from spark_consumers.failures import ExecutorsLostError, translated
from spark_consumers.iceberg.table_note import TableFailedError

_ABORTED = "Job aborted due to stage failure: "
LOST = (
    _ABORTED + "Task 0 in stage 3.0 failed 4 times, most recent failure: Lost task 0.3 in stage 3.0"
    " (TID 9) (127.0.0.1 executor 4): ExecutorLostFailure (executor 4 exited caused by one of the"
    " running tasks) Reason: Command exited with code 137\nDriver stacktrace:",
    _ABORTED + "ShuffleMapStage 5 (save at <unknown>:0) has failed the maximum allowable number of"
    " times: 4. Most recent failure reason:\norg.apache.spark.shuffle.MetadataFetchFailedException:"
    " Missing an output location for shuffle 1 partition 0",
    _ABORTED + "A shuffle map stage with indeterminate output was failed and retried. However,"
    " Spark cannot rollback the ResultStage 7 to re-process the input data, and has to fail this"
    " job.",
)
ENDED = (
    "Job 12 cancelled because SparkContext was shut down",
    "Cannot call methods on a stopped SparkContext.\nThis stopped SparkContext was created at:",
)


@pytest.mark.parametrize("text", [*LOST, *ENDED])
def test_lost_executors_are_a_reason_to_try_again_and_not_to_park_a_table(text: str) -> None:
    error = PySparkException(text)
    failure = translated(error, "apply an epoch")
    assert isinstance(failure, Retryable)
    assert isinstance(failure, ExecutorsLostError) == (text in LOST)
    assert failure.exit_code == ExitCode.SERVER_UNREACHABLE
    assert "no row is at fault" in failure.hint
    assert own_fault(error, "public.t") is None


def test_a_full_disk_of_an_executor_is_named() -> None:
    text = _ABORTED + "Task 0 in stage 3.0 failed 4 times, most recent failure: Lost task 0.3 in"
    failure = translated(PySparkException(f"{text}: No space left on device"), "apply an epoch")
    assert failure.exit_code == ExitCode.DISK_FULL


@pytest.mark.parametrize(
    "text",
    [
        "software.amazon.awssdk.core.exception.SdkClientException: Unable to execute HTTP request",
        "Caused by: java.net.SocketTimeoutException: Read timed out",
    ],
)
def test_a_storage_that_does_not_answer_is_no_table_s_own_fault(text: str) -> None:
    error = PySparkException(_ABORTED + text)
    assert isinstance(translated(error, "apply an epoch"), Retryable)
    assert own_fault(error, "public.t") is None


def test_what_nobody_has_foreseen_is_the_own_fault_of_a_table() -> None:
    error = PySparkException("[MERGE_CARDINALITY_VIOLATION] two rows match")
    failure = own_fault(error, "public.t")
    assert isinstance(failure, TableFailedError)
    assert "slottables rebuild --table public.t" in failure.hint
    assert own_fault(failure, "public.t") is failure


_NO_FILE = "org.apache.iceberg.exceptions.NotFoundException: File does not exist: /w/{}/data"


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        (PySparkException(_NO_FILE.format("a")), PySparkException(_NO_FILE.format("b")), True),
        (SlotbridgeError("/w/a is torn"), SlotbridgeError("/w/b is torn"), True),
        (PySparkException(_NO_FILE.format("a")), PySparkException("[MERGE_CARDINALITY]"), False),
        (PySparkException(_NO_FILE.format("a")), SlotbridgeError("/w/b is torn"), False),
    ],
)
def test_two_tables_fail_alike_by_the_cause_and_not_by_the_message(
    first: Exception, second: Exception, *, alike: bool
) -> None:
    """The messages may name each table's own files."""
    failures = own_fault(first, "public.a"), own_fault(second, "public.b")
    causes = {failure.cause for failure in failures if isinstance(failure, TableFailedError)}
    assert len(causes) == (1 if alike else 2)
