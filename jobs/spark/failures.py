"""What Spark raises when a job fails, in one line, and whether the rows or the world failed it.

The planner and Spark Connect raise PySpark's own errors; a job of a classic session that fails in its tasks comes as Py4J's.
"""

from __future__ import annotations

from typing import Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from tidegate.jobs.spec.errors import TransientError

__all__ = ["SPARK_ERRORS", "detect_lost_executors", "lines", "extract_cause"]

SPARK_ERRORS: Final = (PySparkException, Py4JJavaError)
"""For `except`."""
_LOST_EXECUTOR_SIGNS: Final = ("ExecutorLostFailure", "FetchFailed", "Python worker exited unexpectedly", "worker lost")


def lines(error: BaseException) -> list[str]:
    """What the error and Java's errors behind it say, without stack frames."""
    found = f"{error}\n{getattr(error, '_stackTrace', None) or ''}".splitlines()
    return [line.strip() for line in found if line.strip() and not line.lstrip().startswith("at ")]


def extract_cause(error: BaseException) -> str:
    r"""The line that names the cause.

    >>> extract_cause(PySparkException("bad\n\tat org.x\nCaused by: java.io.IOException: gone"))
    'java.io.IOException: gone'
    """
    found = lines(error)
    causes = [line.removeprefix("Caused by: ") for line in found if line.startswith("Caused by: ")]
    own = [line.removeprefix(": ") for line in found if not line.startswith("An error occurred while calling")]
    return (causes[-1:] or own[:1] or [type(error).__name__])[0][:500]


def detect_lost_executors(what: str, error: BaseException) -> TransientError | None:
    """The error for a job that lost too many of its executors or their Python; None when it was something else.

    `what` names the pipeline, or the source that was read.
    """
    mark = next((mark for mark in _LOST_EXECUTOR_SIGNS for line in lines(error) if mark in line), None)
    if mark is None:
        return None
    return TransientError(
        f"{what}: Spark lost the executors of this epoch ({mark})",
        code="spark.executors_lost",
        kept="everything sealed; this epoch is done again",
        advice="tidegate tries again; if it goes on, look at the executors' memory and hosts",
        retry_after=1.0,
    )
