"""The loop that seals what Spark commits, while the store does not answer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.sealed_queries.conftest import JobBench
from tests.sealed_queries.fake_events import end_query, report_batch, report_idle, start_query
from tests.servers.memory_store import Fault
from tidegate.checkpoints.batch_notes import BatchNotes
from tidegate.errors import PoisonError, TransientError
from tidegate.jobs.sealed_queries.seal_loop import SealLoop, SparkReports


def _make_loop(bench: JobBench, reports: SparkReports, **rules: Any) -> SealLoop:
    own = (MagicMock(), MagicMock(), threading.Event())
    return SealLoop(bench.sealer, reports, *own, **rules)


def _report(reports: SparkReports, query: str, batch: int) -> None:
    source = {"description": "FileStreamSource[in]", "numInputRows": 5}
    report_batch(reports, name=query, batchId=batch, sources=[source])


def _list_sealed(bench: JobBench) -> list[tuple[str, int, int]]:
    """Query, batch and rows of each slot."""
    notes = [BatchNotes.from_manifest(one) for one in bench.sealed]
    found = [(one.query, one.queries[one.query]) for one in notes if one is not None]
    return [(query, at.batch, at.rows) for query, at in found]


@dataclass
class EndedQuery:
    """A query of PySpark that has ended: with this error, or its JVM gives this one."""

    failure: Exception | None = None
    lost: Exception | None = None

    def exception(self) -> Exception | None:
        """Tell how it ended."""
        if self.lost is not None:
            raise self.lost
        return self.failure


def test_a_job_whose_script_passes_over_a_failed_query_has_failed(bench: JobBench) -> None:
    """Spark is asked, because its report may come later than the script's end."""
    loop = _make_loop(bench, SparkReports())
    for name, failure in (("good", None), ("bad", ValueError("12,50 is no number"))):
        query, _ = bench.query(name)
        query.facts.query = EndedQuery(failure)
        loop.queries[name] = query
    with pytest.raises(PoisonError, match=r"query bad.*12,50 is no number"):
        loop.require_ends()


def test_a_job_whose_jvm_is_gone_has_not_finished(bench: JobBench) -> None:
    """No query is active then, and nothing says how they ended."""
    loop = _make_loop(bench, SparkReports())
    query, _ = bench.query("q")
    query.facts.query = EndedQuery(lost=ConnectionRefusedError("111"))
    loop.queries["q"] = query
    with pytest.raises(ConnectionRefusedError):
        loop.require_ends()


def test_a_job_whose_queries_have_ended_without_an_error_has_finished(bench: JobBench) -> None:
    """Also if the script has caught the error of a start."""
    loop = _make_loop(bench, SparkReports())
    for name, ended in (("good", EndedQuery()), ("never_started", None)):
        query, _ = bench.query(name)
        query.facts.query, query.facts.trigger = ended, "availableNow"
        loop.queries[name] = query
    loop.require_ends()


def test_a_job_whose_script_stops_spark_has_not_finished(bench: JobBench) -> None:
    """Nothing ends such a query but a stop of the job, unless the spec says that the script may."""
    for may_end in (False, True):
        loop = _make_loop(bench, SparkReports(), may_end=may_end)
        query, _ = bench.query("q")
        query.facts.query = EndedQuery()
        loop.queries["q"] = query
        if may_end:
            loop.require_ends()
        else:
            with pytest.raises(PoisonError, match="query q has ended"):
                loop.require_ends()


def test_a_job_fails_when_one_of_its_queries_is_gone(bench: JobBench) -> None:
    """The script goes on with the others, and never looks."""
    reports = SparkReports()
    loop = _make_loop(bench, reports)
    for name, trigger in (("whole", "availableNow"), ("gone", None)):
        query, _ = bench.query(name)
        query.facts.trigger = trigger
        loop.queries[name] = query
        start_query(reports, name, name)
    end_query(reports, "whole", None)
    loop.check_queries()
    assert loop.error is None
    end_query(reports, "gone", None)
    loop.check_queries()
    assert loop.error is not None
    assert (loop.error.code, loop.error.failure_class.exit_code) == ("job.query_ended", 1)


def test_a_query_that_ends_by_a_stop_of_the_job_is_not_gone(bench: JobBench) -> None:
    """The stop is noted before it reaches the query."""
    reports = SparkReports()
    loop = _make_loop(bench, reports)
    loop.queries["q"], _ = bench.query("q")
    start_query(reports, "q", "q")
    loop._stop.set()
    end_query(reports, "q", None)
    loop.check_queries()
    assert loop.error is None


@pytest.mark.parametrize("place", ["/slots/", "/state/"])
def test_an_outage_leaves_no_batch_out_and_no_figures(bench: JobBench, place: str) -> None:
    """Another query goes on meanwhile, and its batch does not pass for the one that waits."""
    reports = SparkReports()
    loop = _make_loop(bench, reports)
    (first, one), (second, two) = bench.query("first"), bench.query("second")
    loop.queries.update(first=first, second=second)
    two.commit(0)
    _report(reports, "second", 0)
    bench.store.hook = lambda request: Fault.REFUSED if place in request.key else None
    bench.log._seal_budget = 0.0
    with pytest.raises(TransientError):
        loop.seal_committed()
    one.commit(0)
    _report(reports, "first", 0)
    bench.store.hook = None
    loop.seal_committed(patience=0)
    assert sorted(_list_sealed(bench)) == [("first", 0, 5), ("second", 0, 5)]
    assert (first.sealed, second.sealed) == (0, 0)


@dataclass
class WorkingQuery:
    """A query of PySpark whose trigger is active."""

    status: dict[str, bool] = field(default_factory=lambda: {"isTriggerActive": True})


def _look(loop: SealLoop) -> str | None:
    """Look once whether a query is stalled; return the code of what ends the job."""
    loop.error = None
    loop._guard(lambda: loop._refuse_stalled_query() or False)
    return loop.error.code if loop.error else None


def test_a_query_that_hangs_before_its_batch_is_planned_is_stalled(bench: JobBench) -> None:
    """Each batch, and each trigger that finds nothing to do, is progress; a wait between them is."""
    reports = SparkReports()
    loop = _make_loop(bench, reports, batch_within=-1.0)
    query, made = bench.query("q")
    query.facts.query = working = WorkingQuery()
    loop.queries["q"] = query
    start_query(reports, "run", "q")
    assert _look(loop) is None
    _report(reports, "q", 0)
    assert _look(loop) is None
    report_idle(reports, "run")
    assert _look(loop) is None
    working.status["isTriggerActive"] = False
    assert [_look(loop), _look(loop)] == [None, None]
    working.status["isTriggerActive"] = True
    assert _look(loop) == "job.batch_stalled"
    made.plan(1)
    assert [_look(loop), _look(loop)] == [None, "job.batch_stalled"]


def test_a_batch_may_run_for_an_hour_by_default(bench: JobBench) -> None:
    """A look a moment later changes nothing."""
    loop = _make_loop(bench, SparkReports())
    loop.queries["q"], made = bench.query("q")
    made.plan(0)
    assert [_look(loop), _look(loop)] == [None, None]
