"""What no part of the driver expected, sorted: the world's faults are waited out or left to the supervisor, others defects."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import structlog

from tidegate.jobs.spec.errors import PoisonError, TidegateError, TransientError

__all__ = ["disk_full", "known_error"]

_log = structlog.get_logger("tidegate.driver")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXT = ("No space left on device", "Disk quota exceeded")  # what is left of the number behind a JVM

_SERVER_GONE = ("StatusCode.UNAVAILABLE", "INVALID_HANDLE.", "RETRIES_EXCEEDED")  # what Spark Connect's client says then


def known_error(pipeline: str, error: Exception) -> TidegateError:
    """The error as people are told it. A traceback goes to the log, and only for what may be a defect."""
    gone = disk_full(pipeline, error) or _spark_lost(pipeline, error)
    if gone is not None:
        return gone
    if isinstance(error, TidegateError):
        return error
    first = _first_line(error)
    _log.error("traceback", pipeline=pipeline, exc_info=error)
    return PoisonError(
        f"{pipeline}: {type(error).__name__}: {first}",
        code="driver.unexpected",
        pipeline=pipeline,
        kept="everything sealed; this epoch was not",
        advice="the traceback is in the driver's log; if it names no row of yours it is a defect of tidegate",
    )


def _spark_lost(pipeline: str, error: Exception) -> TransientError | None:
    """The error for a JVM or a Spark Connect server that died under the driver: a new driver may find another.

    Py4J says it in many ways, also that a class of Spark's does not exist; so the JVM itself is asked.
    """
    if isinstance(error, TidegateError) and not isinstance(error, PoisonError):
        return None
    what = "JVM" if isinstance(error, ConnectionError | EOFError) else next(filter(None, map(_lost, _causes(error))), None)
    if what is None:
        return None
    return TransientError(
        f"{pipeline}: Spark's {what} is gone ({_first_line(error) or type(error).__name__})",
        code="driver.jvm_lost",
        pipeline=pipeline,
        kept="everything sealed; this epoch was not",
        advice="the supervisor starts the driver again; by hand: the same command again",
        retry_after=1.0,
    )


def _lost(cause: BaseException) -> str | None:
    """What is gone, if this error says so."""
    room = type(cause).__module__
    if room.startswith("py4j.") and not _jvm_answers():
        return "JVM"
    if room.startswith("pyspark.") and any(text in str(cause) for text in _SERVER_GONE):
        return "Connect server, or its session,"
    return None


def _jvm_answers() -> bool:
    from pyspark import SparkContext

    try:
        return bool(SparkContext._gateway and SparkContext._gateway.jvm.System.nanoTime())
    except Exception:
        return False


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:500]


def disk_full(pipeline: str, error: BaseException) -> TransientError | None:
    """The error for a scratch disk without room, if that is what it comes from, behind whatever it was wrapped in.

    Errors that already say who has to act are left alone; but Spark's word for a failed job is not the last one.

    >>> disk_full("p", OSError(errno.ENOSPC, "No space left on device", "/scratch/x")).message
    'p: no space left for scratch files (/scratch/x: No space left on device)'
    """
    if isinstance(error, TidegateError) and not isinstance(error, PoisonError):
        return None
    for cause in _causes(error):
        by_number = isinstance(cause, OSError) and cause.errno in _FULL
        text = next((t for t in _FULL_TEXT if t in str(cause)), None)
        if by_number or text:
            where = f"{cause.filename}: " if isinstance(cause, OSError) and cause.filename else ""
            return TransientError(
                f"{pipeline}: no space left for scratch files ({where}{text or str(cause)})",
                code="driver.disk_full",
                pipeline=pipeline,
                kept="everything sealed; this epoch is done again",
                advice="make room on the disk of the scratch folder (--work) and of Spark's spark.local.dir; "
                "the driver goes on by itself",
                retry_after=2.0,
            )
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, outermost first."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        current = current.__cause__ or current.__context__
