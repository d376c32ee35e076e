"""Chooses how the kernel reaches Spark's Python tasks: by the session."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pyspark.sql import SparkSession

from tidegate.jobs.rows.cut_division import ReadUnit
from tidegate.jobs.rows.event_files import EventsOrder, FileAnswer, FirstPositions, RangesOrder
from tidegate.jobs.rows.unit_reading import ReadOrder, UnitAnswer
from tidegate.jobs.spec.pipeline import PipelineSpec

from . import frame_tasks, python_tasks
from .python_tasks import KeptRows, StoreSample


class TaskRunner(Protocol):
    """What the modules `python_tasks` and `frame_tasks` offer; the first says what each does."""

    def run_read_job(
        self,
        session: SparkSession,
        order: ReadOrder,
        units: list[ReadUnit],
        variables: Mapping[str, str] | None,
    ) -> tuple[list[UnitAnswer], KeptRows | None]: ...

    def run_events_job(
        self, kept: KeptRows, order: EventsOrder, firsts: FirstPositions
    ) -> list[FileAnswer]: ...

    def run_release_job(
        self, session: SparkSession, kept: KeptRows | None, order: RangesOrder
    ) -> list[FileAnswer]: ...

    def run_small_job(
        self,
        session: SparkSession,
        body: Callable[[Iterable[Any]], Iterator[Any]],
        items: Sequence[Any],
    ) -> list[Any]: ...

    def start_workers(
        self,
        session: SparkSession,
        variables: Mapping[str, str],
        libraries: Sequence[str],
        sample: StoreSample,
        spec: PipelineSpec,
    ) -> None: ...


def choose_runner(session: SparkSession) -> TaskRunner:
    """The runner for a session: Spark Connect has no RDDs and no accumulators."""
    return python_tasks if hasattr(session, "sparkContext") else frame_tasks
