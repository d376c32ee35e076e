"""The loop that seals what Spark commits, while the store does not answer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.sealed_queries.conftest import JobBench
from tests.sealed_queries.fake_events import end_query, report_batch, report_idle, start_query
from tests.servers.memory_store import Fault, StoreRequest
from tidegate.checkpoints.batch_notes import BatchNotes
from tidegate.checkpoints.store import StoreDeniedError
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


def test_a_store_that_refuses_the_keys_for_a_while_is_waited_for(bench: JobBench) -> None:
    """Keys are renewed while jobs run; the ten minutes are those of pipelines."""
    reports = SparkReports()
    loop = _make_loop(bench, reports)
    loop._closing.set()  # no pause between two tries
    query, made = bench.query("q")
    loop.queries["q"] = query
    made.commit(0)

    def deny_slots(request: StoreRequest) -> None:
        if "/slots/" in request.key:
            raise StoreDeniedError("403 ExpiredToken", code="store.denied")

    bench.store.hook = deny_slots
    again = partial(loop._guard, lambda: loop.seal_committed(patience=0) < 0)
    assert [again(), again()] == [True, True]
    bench.store.hook = None
    assert not again()  # it need not be called again
    assert (query.sealed, loop.error) == (0, None)
    made.commit(1)
    bench.store.hook = deny_slots
    assert again()
    assert loop._denied_since is not None
    loop._denied_since -= 600.0
    assert not again()
    assert loop.error is not None
    assert loop.error.failure_class.exit_code == 2


@dataclass
class WorkingQuery:
    """A query of PySpark whose trigger is active."""

    status: dict[str, bool] = field(default_factory=lambda: {"isTriggerActive": True})


def _look(loop: SealLoop) -> str | None:
    """Look once whether a query is stalled; return the code of what ends the job."""
    loop.error = None

    def refuse_stalled_query() -> bool:
        loop._refuse_stalled_query()
        return False

    loop._guard(refuse_stalled_query)
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


@pytest.mark.parametrize(
    ("entries", "raced"),
    [(["0"], False), (["0", "2"], False), (["1"], False), (["9.compact"], True), ([], False)],
)
def test_a_batch_is_sealed_only_if_the_sink_has_it_and_nothing_above(
    bench: JobBench, tmp_path: Path, entries: list[str], raced: bool
) -> None:
    """Spark may have written others meanwhile, up to batch 2, which is planned."""
    assert _seal_over_log(bench, tmp_path / "log", entries) is raced


def test_a_batch_of_a_driver_that_was_taken_over_is_found_in_the_sink(
    bench: JobBench, tmp_path: Path
) -> None:
    """It has written into the log of the file sink after this driver has begun."""
    assert _seal_over_log(bench, tmp_path / "log", ["0", "46"])
    assert bench.sealed == []


def _seal_over_log(bench: JobBench, log: Path, entries: list[str]) -> bool:
    """Seal batch 0, with batch 2 planned; return whether the job ends with a lost race."""
    loop = _make_loop(bench, SparkReports())
    query, made = bench.query("q")
    query.sink_log = log
    log.mkdir()
    for name in entries:
        (log / name).write_text("v1")
    made.commit(0)
    made.plan(2)
    loop.queries["q"] = query
    loop._guard(lambda: bool(loop.seal_committed(patience=0)) and False)
    assert (loop.error is not None) == bool(loop.raced)
    return loop.error is not None and loop.error.code == "job.sink_raced"
