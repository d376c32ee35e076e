"""What no part of the driver expected, sorted.

The world's faults are waited out or left to the supervisor, others defects.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

import structlog

from tidegate.errors import PoisonError, TidegateError, TransientError

_log = structlog.get_logger("tidegate.driver")

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_DISK_FULL_TEXTS = (
    "No space left on device",
    "Disk quota exceeded",
)  # what is left of the number behind a JVM

_CONNECT_LOST_TEXTS = (
    "StatusCode.UNAVAILABLE",
    "INVALID_HANDLE.",
    "RETRIES_EXCEEDED",
)  # what Spark Connect's client says then


def classify_error(pipeline: str, error: Exception) -> TidegateError:
    """The error as people are told it.

    A traceback goes to the log, and only for what may be a defect.
    """
    gone = detect_full_disk(pipeline, error) or _detect_spark_loss(pipeline, error)
    if gone is not None:
        return gone
    if isinstance(error, TidegateError):
        return error
    first = _get_first_line(error)
    _log.error("traceback", pipeline=pipeline, exc_info=error)
    return PoisonError(
        f"{pipeline}: {type(error).__name__}: {first}",
        code="driver.unexpected",
        pipeline=pipeline,
        kept="everything sealed; this epoch was not",
        advice=(
            "the traceback is in the driver's log; if it names no row of yours it is a defect of"
            " tidegate"
        ),
    )


def _detect_spark_loss(pipeline: str, error: Exception) -> TransientError | None:
    """The error for a JVM or a Spark Connect server that died under the driver.

    A new driver may find another.

    Py4J says it in many ways, also that a class of Spark's does not exist; so the JVM itself is
    asked.
    """
    if isinstance(error, TidegateError) and not isinstance(error, PoisonError):
        return None
    what = (
        "JVM"
        if isinstance(error, ConnectionError | EOFError)
        else next(filter(None, map(_name_lost_process, _iterate_causes(error))), None)
    )
    if what is None:
        return None
    return TransientError(
        f"{pipeline}: Spark's {what} is gone ({_get_first_line(error) or type(error).__name__})",
        code="driver.jvm_lost",
        pipeline=pipeline,
        kept="everything sealed; this epoch was not",
        advice="the supervisor starts the driver again; by hand: the same command again",
        retry_after=1.0,
    )


def _name_lost_process(cause: BaseException) -> str | None:
    """What is gone, if this error says so."""
    room = type(cause).__module__
    if room.startswith("py4j.") and not _is_jvm_responding():
        return "JVM"
    if room.startswith("pyspark.") and any(text in str(cause) for text in _CONNECT_LOST_TEXTS):
        return "Connect server, or its session,"
    return None


def _is_jvm_responding() -> bool:
    from pyspark import SparkContext

    try:
        return bool(SparkContext._gateway and SparkContext._gateway.jvm.System.nanoTime())
    except Exception:
        return False


def _get_first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:500]


def detect_full_disk(pipeline: str, error: BaseException) -> TransientError | None:
    """The error for a scratch disk without room, if that is what it comes from, behind whatever it was wrapped in.

    Errors that already say who has to act are left alone; but Spark's word for a failed job is not
    the last one.

    >>> detect_full_disk("p", OSError(errno.ENOSPC, "No space left on device", "/scratch/x")).message
    'p: no space left for scratch files (/scratch/x: No space left on device)'
    """
    if isinstance(error, TidegateError) and not isinstance(error, PoisonError):
        return None
    for cause in _iterate_causes(error):
        by_number = isinstance(cause, OSError) and cause.errno in _DISK_FULL_ERRNOS
        text = next((t for t in _DISK_FULL_TEXTS if t in str(cause)), None)
        if by_number or text:
            where = f"{cause.filename}: " if isinstance(cause, OSError) and cause.filename else ""
            return TransientError(
                f"{pipeline}: no space left for scratch files ({where}{text or str(cause)})",
                code="driver.disk_full",
                pipeline=pipeline,
                kept="everything sealed; this epoch is done again",
                advice=(
                    "make room on the disk of the scratch folder (--work) and of Spark's"
                    " spark.local.dir; the driver goes on by itself"
                ),
                retry_after=2.0,
            )
    return None


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, outermost first."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        current = current.__cause__ or current.__context__
