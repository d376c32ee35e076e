"""A job that fails in its tasks is reported in one line, and what lost its executors is not blamed on
rows.
"""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from pyspark.errors import PySparkException

from tests.engine.harness import Bench
from tests.rows.units import FOLDERS, WINDOW, rows_at, slice_of
from tests.spark.agreement import spec_of
from tests.streams.support import World, streams_spec
from tidegate.checkpoints.errors import STORE_UNAVAILABLE
from tidegate.checkpoints.local_store import LocalStore
from tidegate.errors import PoisonError, TidegateError, TransientError
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.eventtime.decider_state import DeciderState
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.spark import lost_workers, python_tasks
from tidegate.jobs.spark.lost_workers import LEAST_SECONDS, MOST_JOBS, LostWorkers
from tidegate.jobs.spark.mover import SparkMover
from tidegate.jobs.spark.spark_session import (
    SPARK_ERRORS,
    carry_error,
    detect_large_results,
    detect_lost_executors,
    extract_cause,
    find_carried_error,
)
from tidegate.jobs.spark.stream_tasks import TaskDispatcher
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.streams.dispatcher import DispatchRunner, make_local_runner
from tidegate.jobs.streams.row_history import LogHistory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(shutil.which("java") is None, reason="needs a JVM"),
]


def test_a_job_that_fails_in_its_tasks(session: SparkSession) -> None:
    """Whether it comes as PySpark's error or as Py4J's, it is caught, and the line names the cause."""
    for query in (
        "select raise_error('no such tide') from range(1)",
        "select * from no_such_table",
    ):
        with pytest.raises(SPARK_ERRORS) as failed:
            session.sql(query).collect()
        assert "tide" in extract_cause(failed.value) or "no_such_table" in extract_cause(
            failed.value
        )
        assert "\n" not in extract_cause(failed.value)
        assert detect_lost_executors("p", failed.value) is None


def test_a_reducer_whose_worker_was_lost_is_tried_again(tmp_path: Path) -> None:
    """It is transient, as for the mover; the reducer is not blamed."""
    session: Any = Mock()
    session.sparkContext.environment = {}
    session.sparkContext.parallelize.side_effect = PySparkException(
        "Python worker exited unexpectedly (crashed)"
    )
    spec = streams_spec(streams={"d": {}}, pipes={"p": {"from": "events", "to": "d"}})

    def dispatch_in_tasks(bench: Bench, history: LogHistory) -> DispatchRunner:
        here = make_local_runner(bench.store, history)
        return TaskDispatcher(session, spec, bench.store, history, here)

    world = World(spec, LocalStore(tmp_path), dispatch_in_tasks)
    with pytest.raises(TransientError) as failed:
        world.epoch((1, 1))
    assert failed.value.code == "spark.executors_lost"


def test_lost_executors_are_the_worlds_fault() -> None:
    """In the words of Spark's scheduler."""
    words = (
        "Job aborted due to stage failure: Task 3 failed 4 times, most recent failure:"
        " ExecutorLostFailure (executor 1 exited)"
    )
    found = detect_lost_executors("p", RuntimeError(words))
    assert found is not None
    assert found.code == "spark.executors_lost"


def test_a_slice_that_ends_its_workers_is_named(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three jobs, with its object; the first two are tried again."""

    def die(*_: Any) -> None:  # sent whole
        os._exit(1)

    monkeypatch.setattr(python_tasks, "_read_units", die)
    store = LocalStore(tmp_path)
    spec = spec_of({"a": {}}, windows={"w": WINDOW})
    cut = Cut((slice_of(store, Member("a"), rows_at(1, 2)),))
    with closing(SparkMover(store, spec, tmp_path / "work", session)) as mover:
        monkeypatch.setattr(lost_workers, "LEAST_SECONDS", 0.0)
        found = [_fail_survey(mover, spec, cut) for _ in range(MOST_JOBS)]
    assert [one.code for one in found[:-1]] == ["spark.executors_lost"] * (MOST_JOBS - 1)
    assert isinstance(found[-1], PoisonError)
    assert found[-1].code == "spark.executors_lost_again"
    assert "inbox/a/0.parquet rows 0 to 2" in found[-1].message
    assert "Python worker exited unexpectedly" in found[-1].message


def test_a_worker_without_memory_refuses_its_slice(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first job says so, and none of its workers ends."""
    small = {python_tasks.CONTAINER_VARIABLE: str(1 << 20)}
    monkeypatch.setattr(python_tasks, "_describe_container", lambda _: small)
    # Other tests share the session, whose workers keep their environment.
    context = session.sparkContext
    monkeypatch.setattr(context, "environment", context.environment)
    store = LocalStore(tmp_path)
    spec = spec_of({"a": {}}, windows={"w": WINDOW})
    cut = Cut((slice_of(store, Member("a"), rows_at(1, 2)),))
    with closing(SparkMover(store, spec, tmp_path / "work", session)) as mover:
        refused = _fail_survey(mover, spec, cut)
    assert isinstance(refused, PoisonError)
    assert refused.code == "rows.no_memory"
    assert "inbox/a/0.parquet rows 0 to 2" in refused.message


def _fail_survey(mover: SparkMover, spec: PipelineSpec, cut: Cut) -> TidegateError:
    state = DeciderState.initial(spec).to_dict()
    with pytest.raises(TidegateError) as failed:
        mover.survey(cut, state, FOLDERS)
    return failed.value


def test_only_the_same_work_is_given_up_and_only_after_minutes() -> None:
    """A cluster that is away takes executors from whatever runs."""
    words = RuntimeError("ExecutorLostFailure (executor 1 exited)")
    now = [0.0]
    lost = LostWorkers("p", lambda: now[0])
    for _ in range(2 * MOST_JOBS):
        assert isinstance(lost.judge("p", words), TransientError)
        now[0] += LEAST_SECONDS
        lost.forget("p")
    for number in range(2 * MOST_JOBS):
        other = RuntimeError("ExecutorLostFailure (executor 1 exited)")
        other.add_note(f"slice {number}")
        assert isinstance(lost.judge("p", other), TransientError)
        now[0] += LEAST_SECONDS
    lost.forget("p")
    ends = []
    for number in range(2 * MOST_JOBS):  # two slices take turns to fail first
        other = RuntimeError("ExecutorLostFailure (executor 1 exited)")
        other.add_note(f"slice {number % 2}")
        ends.append(type(lost.judge("p", other)))
        now[0] += LEAST_SECONDS
    assert ends == [TransientError] * 2 * (MOST_JOBS - 1) + [PoisonError] * 2
    for _ in range(2 * MOST_JOBS):
        assert isinstance(lost.judge("a sink", words), TransientError)
    assert isinstance(lost.judge("p", words), TransientError)
    now[0] += LEAST_SECONDS
    assert isinstance(lost.judge("a sink", words), PoisonError)
    assert lost.judge("p", RuntimeError("no such tide")) is None


def test_results_beyond_the_bound_end_the_driver() -> None:
    """In the words of Spark's scheduler; the same epoch would fail again."""
    words = (
        "Job aborted due to stage failure: Total size of serialized results of 2 tasks (17.0 MiB)"
        " is bigger than spark.driver.maxResultSize (16.0 MiB)"
    )
    found = detect_large_results("p", RuntimeError(words))
    assert found is not None
    assert found.code == "spark.results_too_large"
    assert "17.0 MiB" in str(found)
    assert detect_large_results("p", RuntimeError("no such tide")) is None


def test_an_error_that_a_task_carries_is_found_again() -> None:
    """Whatever Spark writes around it; one that is cut off is Spark's failure."""
    away: TidegateError = STORE_UNAVAILABLE(uri="s3://b/p", cause="refused")
    text = f"Job aborted: Traceback\n  File x\nRuntimeError: {carry_error(away)}\n\n\tat org.apache"
    found = find_carried_error(PySparkException(text))
    assert isinstance(found, TransientError)
    assert (found.code, found.message) == (away.code, away.message)
    assert find_carried_error(PySparkException(text[:90])) is None
    assert find_carried_error(PySparkException("no such tide")) is None
