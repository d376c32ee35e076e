"""Classify exceptions that no part of the driver expected.

Failures of the environment (a full disk, a lost JVM) become `TransientError`. What the driver then
does is decided in `epoch_loop`: it waits on a full disk, and ends otherwise, so that its supervisor
starts it again. Everything else is reported as a bug.
"""

import errno
from collections.abc import Iterator

import structlog

from tidegate.errors import PoisonError, TidegateError, TransientError, get_first_line

from .errors import BACKGROUND_FAILED, DISK_FULL, JVM_LOST, UNEXPECTED

_log = structlog.get_logger("tidegate.driver")

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# The JVM passes on the text of such an error, but not its number.
_DISK_FULL_TEXTS = ("No space left on device", "Disk quota exceeded")
# How Spark Connect's client reports a server or a session that is gone.
_CONNECT_LOST_TEXTS = ("StatusCode.UNAVAILABLE", "INVALID_HANDLE.", "RETRIES_EXCEEDED")


def classify_error(pipeline: str, error: Exception) -> TidegateError:
    """Return the error to show to people.

    A full disk or a lost JVM behind it comes first. Any other TidegateError is returned as it is.
    Only an error that may be a bug is logged with its traceback, here.
    """
    environment_error = detect_full_disk(pipeline, error) or _detect_spark_loss(pipeline, error)
    # Before the error's own class: Spark reports a full disk as if the epoch were wrong.
    if environment_error is not None:
        return environment_error
    if isinstance(error, TidegateError):
        return error
    _log.error("traceback", pipeline=pipeline, exc_info=error)
    return UNEXPECTED(pipeline=pipeline, kind=type(error).__name__, text=get_first_line(error))


def log_background_failure(event: str, task: str, error: Exception) -> TidegateError:
    """Log the failure of one round of a background thread, and return it for the status.

    The thread goes on with its next round. An error that may be a bug is logged with its traceback.

    Args:
        event: name of the log line.
        task: what failed, as the subject of a sentence.
        error: the exception.
    """
    if isinstance(error, TidegateError):
        _log.warning(event, code=error.code, error=error.message)
        return error
    _log.error(event, task=task, exc_info=error)
    return BACKGROUND_FAILED(task=task, kind=type(error).__name__, text=get_first_line(error))


def _detect_spark_loss(pipeline: str, error: Exception) -> TransientError | None:
    """Return the error for a JVM or a Spark Connect server that died under the driver.

    Py4J reports a dead JVM in many ways, even as a Spark class that does not exist. So the JVM
    itself is asked whether it still answers.
    """
    if _names_who_must_act(error):
        return None
    lost_process = (
        "JVM"
        if isinstance(error, ConnectionError | EOFError)
        else next(filter(None, map(_name_lost_process, _iterate_causes(error))), None)
    )
    if lost_process is None:
        return None
    text = get_first_line(error)
    return JVM_LOST(pipeline=pipeline, what=lost_process, text=text)


def _names_who_must_act(error: BaseException) -> bool:
    # Spark's report of a failed job is a PoisonError too, and its cause may be the environment.
    return isinstance(error, TidegateError) and not isinstance(error, PoisonError)


def _name_lost_process(cause: BaseException) -> str | None:
    """Return which process is gone, if this error shows it."""
    module = type(cause).__module__
    # Py4J loses a JVM that ran; PySpark says itself when one has ended while it began.
    began = "JAVA_GATEWAY_EXITED" in str(cause)
    if began or (module.startswith("py4j.") and not _is_jvm_responding()):
        return "JVM"
    if module.startswith("pyspark.") and any(text in str(cause) for text in _CONNECT_LOST_TEXTS):
        return "Connect server, or its session,"
    return None


def _is_jvm_responding() -> bool:
    from pyspark import SparkContext

    try:
        return bool(SparkContext._gateway and SparkContext._gateway.jvm.System.nanoTime())
    except Exception:
        return False


def detect_full_disk(pipeline: str, error: BaseException) -> TransientError | None:
    """Return the error for a full scratch disk if that is behind `error`, however it is wrapped.

    None otherwise, and for each TidegateError but a PoisonError.

    >>> detect_full_disk("p", OSError(errno.ENOSPC, "No space left on device", "/x")).message
    'p: no space left for scratch files (/x: No space left on device)'
    """
    if _names_who_must_act(error):
        return None
    for cause in _iterate_causes(error):
        text = next((t for t in _DISK_FULL_TEXTS if t in str(cause)), None)
        if text or (isinstance(cause, OSError) and cause.errno in _DISK_FULL_ERRNOS):
            where = f"{cause.filename}: " if isinstance(cause, OSError) and cause.filename else ""
            return DISK_FULL(pipeline=pipeline, detail=where + (text or str(cause)))
    return None


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and what it was raised from, outermost first."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        current = current.__cause__ or current.__context__
