"""Ends work that loses its executors again and again.

Work that needs more memory than a container has ends its executor wherever it runs. Spark tries a
task some times (`spark.task.maxFailures`), and then the driver does the epoch again.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from tidegate.errors import ErrorDefinition, TidegateError
from tidegate.jobs.rows.cut_division import ReadUnit

from .errors import EXECUTORS_LOST_AGAIN
from .spark_session import (
    SPARK_ERRORS,
    detect_large_results,
    detect_lost_executors,
    extract_cause,
    find_carried_error,
    lines,
)

MOST_JOBS: Final = 3
"""Jobs that may lose their executors with the same work: on a cluster each has tried four times."""
LEAST_SECONDS: Final = 300.0
"""Between the first and the last of them: a cluster that is away for less takes any executors."""
_FAILED_TASK: Final = re.compile(r"Task (\d+) in stage [\d.]+ failed")


class LostWorkers:
    """Counts jobs that lose their executors, for each kind of work; safe for several threads.

    Args:
        pipeline: whose work it is.
        clock: seconds, monotonic.
    """

    def __init__(self, pipeline: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._pipeline = pipeline
        self._clock = clock
        self._lock = threading.Lock()
        # Kind -> work that lost its executors -> how often, and when it did first.
        self._lost: dict[str, dict[str, tuple[int, float]]] = {}

    def explain(self, kind: str, error: BaseException, failed: ErrorDefinition) -> TidegateError:
        """Return the error for a job that failed; `failed` if nothing more is known of it."""
        return (
            find_carried_error(error)
            or detect_large_results(self._pipeline, error)
            or self.judge(kind, error)
            or failed(pipeline=self._pipeline, cause=extract_cause(error))
        )

    def judge(self, kind: str, error: BaseException) -> TidegateError | None:
        """Return the error for a job that lost its executors, as `detect_lost_executors` does.

        It is not to be tried again if the same work has ended in this way too often and for too
        long since `forget`.
        """
        lost = detect_lost_executors(kind, error, pipeline=self._pipeline)
        if lost is None:
            return None
        work = " ".join(getattr(error, "__notes__", ())) or kind
        now = self._clock()
        with self._lock:
            known = self._lost.setdefault(kind, {})
            jobs, since = known.pop(work, (0, now))
            if jobs + 1 < MOST_JOBS or now - since < LEAST_SECONDS:
                known[work] = (jobs + 1, since)
                return lost
        cause = next((line for line in lines(error) if "Lost task" in line), lost.message)[:500]
        return EXECUTORS_LOST_AGAIN(pipeline=self._pipeline, jobs=jobs + 1, work=work, cause=cause)

    def forget(self, kind: str) -> None:
        """Count work of this kind from 0 again: some of it is done."""
        with self._lock:
            self._lost.pop(kind, None)


@contextmanager
def note_failed_unit(units: Sequence[ReadUnit]) -> Iterator[None]:
    """Note on an error of Spark which of the units failed, in a job with a task for each."""
    try:
        yield
    except SPARK_ERRORS as error:
        found = next(filter(None, map(_FAILED_TASK.search, lines(error))), None)
        if found is not None and int(found[1]) < len(units):
            error.add_note(units[int(found[1])].describe())
        raise
