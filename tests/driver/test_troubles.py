"""How the driver sorts what no one expected."""

from __future__ import annotations

import errno

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException, PySparkRuntimeError

from tidegate.errors import ConfigurationError, FencedError, PoisonError, TidegateError
from tidegate.jobs.driver import error_classification
from tidegate.jobs.driver.error_classification import classify_error, detect_full_disk

FULL = OSError(errno.ENOSPC, "No space left on device", "/scratch/part.parquet")


def wrapped(error: TidegateError, cause: Exception) -> TidegateError:
    """An error raised from another."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        wrapped(PoisonError("Spark could not compute this epoch", code="spark.failed"), FULL),
        PoisonError(
            "Job aborted: java.io.IOException: No space left on device", code="spark.failed"
        ),
    ],
)
def test_a_full_disk_is_waited_out_however_it_is_wrapped(error: Exception) -> None:
    """It is transient, names the pipeline, what is kept and what to do."""
    known = detect_full_disk("flights", error)
    assert known is not None
    assert (known.code, known.pipeline, known.retry_after) == ("driver.disk_full", "flights", 2.0)
    assert classify_error("flights", error).failure_class.exit_code == 3
    assert "flights: no space left for scratch files" in known.message
    assert known.kept
    assert known.advice


def test_a_jvm_that_ends_while_it_begins_is_lost_and_no_row_is_to_blame() -> None:
    """PySpark says so in an error of its own, which the mover takes for one of the epoch."""
    began = PySparkRuntimeError(
        "[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number."
    )
    error = wrapped(PoisonError("Spark could not compute this epoch", code="spark.failed"), began)
    assert classify_error("p", error).code == "driver.jvm_lost"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such thing"),
        ConnectionRefusedError("JVM"),
        PoisonError("bad row", code="row.bad_value"),
        wrapped(FencedError("taken over", code="lease.lost"), FULL),
        wrapped(ConfigurationError("no bucket", code="store.denied"), FULL),
    ],
)
def test_what_this_process_cannot_outlive_ends_it(error: Exception) -> None:
    """Defects, a lost JVM, poison, fencing and wrong names are not taken for a full disk."""
    assert detect_full_disk("p", error) is None


def test_a_lost_jvm_is_known_by_whatever_py4j_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of a call it looks like a class that does not exist.

    Only a JVM that answers makes that a defect.
    """
    strange = Py4JError("org.apache.spark.sql.classic.SparkSession does not exist in the JVM")
    poison = wrapped(
        PoisonError("Spark could not compute this epoch", code="spark.failed"), strange
    )
    monkeypatch.setattr(error_classification, "_is_jvm_responding", lambda: False)
    assert [classify_error("p", error).code for error in (strange, poison)] == [
        "driver.jvm_lost"
    ] * 2
    monkeypatch.setattr(error_classification, "_is_jvm_responding", lambda: True)
    assert [classify_error("p", error).code for error in (strange, poison)] == [
        "driver.unexpected",
        "spark.failed",
    ]


@pytest.mark.parametrize(
    "words",
    ["<_MultiThreadedRendezvous: StatusCode.UNAVAILABLE>", "[INVALID_HANDLE.SESSION_NOT_FOUND]"],
)
def test_a_lost_connect_server_is_worth_a_new_driver(words: str) -> None:
    """The server is away, or came back without our session: no fault of the pipeline's."""
    poison = wrapped(
        PoisonError("Spark could not compute this epoch", code="spark.failed"),
        PySparkException(words),
    )
    known = classify_error("p", poison)
    assert (known.code, known.failure_class.exit_code) == ("driver.jvm_lost", 3)


@pytest.mark.parametrize(
    ("error", "code", "exit_code"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "driver.jvm_lost", 3),
        (EOFError(), "driver.jvm_lost", 3),
        (ZeroDivisionError("division by zero"), "driver.unexpected", 1),
        (FencedError("taken over", code="lease.lost"), "lease.lost", 4),
    ],
)
def test_every_end_has_a_sentence_and_an_exit_code(
    error: Exception, code: str, exit_code: int
) -> None:
    """A lost JVM is worth a new start; a defect says where its traceback is."""
    known = classify_error("p", error)
    assert (known.code, known.failure_class.exit_code) == (code, exit_code)
    assert "\n" not in known.message
