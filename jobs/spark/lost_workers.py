"""Ends work that loses its executors again and again.

Work that needs more memory than a container has ends its executor wherever it runs. Spark tries a
task some times (`spark.task.maxFailures`), and then the driver does the epoch again.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from tidegate.errors import TidegateError
from tidegate.jobs.rows.cut_division import ReadUnit

from .errors import EXECUTORS_LOST_AGAIN
from .spark_session import SPARK_ERRORS, detect_lost_executors, lines

MOST_JOBS: Final = 3
"""Jobs in a row that may lose their executors: on a cluster each of them has tried four times."""
_FAILED_TASK: Final = re.compile(r"Task (\d+) in stage [\d.]+ failed")


class LostWorkers:
    """Counts jobs that lose their executors, for each thread of the driver.

    A thread does one thing after another, such as the epochs or one sink.
    """

    def __init__(self, pipeline: str) -> None:
        self._pipeline = pipeline
        self._jobs = Counter[int]()

    def judge(self, what: str, error: BaseException) -> TidegateError | None:
        """Return the error for a job that lost its executors, as `detect_lost_executors` does.

        It is not to be tried again if too many jobs have ended in this way since `forget`.
        """
        lost = detect_lost_executors(what, error, pipeline=self._pipeline)
        if lost is None:
            return None
        thread = threading.get_ident()
        self._jobs[thread] += 1
        if self._jobs[thread] < MOST_JOBS:
            return lost
        sign = lost.message
        cause = next((line for line in lines(error) if "Lost task" in line), sign)[:500]
        work = " ".join(getattr(error, "__notes__", ())) or what
        jobs = self._jobs.pop(thread)
        return EXECUTORS_LOST_AGAIN(pipeline=self._pipeline, jobs=jobs, work=work, cause=cause)

    def forget(self) -> None:
        """Count from 0 again: the work of this thread is done."""
        self._jobs.pop(threading.get_ident(), None)


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
