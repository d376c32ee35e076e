"""What is read from Spark's reports and plans, here from objects of the same shape."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from tidegate.checkpoints.batch_notes import BatchReport
from tidegate.jobs.sealed_queries.seal_loop import (
    SparkReports,
    find_watermark_holder,
)


def _node(name: str, *children: Any, **more: Any) -> Any:
    node = MagicMock(**more)
    node.nodeName.return_value = name
    node.children().size.return_value = len(children)
    node.children().apply.side_effect = lambda number: children[number]
    return node


def _query(policy: str, **marks: int | None) -> Any:
    """A join of one source per watermark; None: no row of the source was seen yet."""
    known, sides = MagicMock(), []
    found = {}
    for source, mark in marks.items():
        leaf = _node("StreamingExecutionRelation")
        leaf.source().toString.return_value = source
        side = _node("EventTimeWatermark", leaf)
        side.nodeId.return_value = source
        sides.append(side)
        found[source] = MagicMock()
        found[source].isDefined.return_value = mark is not None
        found[source].get.return_value = mark
    known.apply.side_effect = found.__getitem__
    query = MagicMock()
    execution = query._jsq.streamingQuery()
    execution.watermarkTracker().watermarkMap.return_value = known
    execution.logicalPlan.return_value = _node("Join", *sides)
    execution.sparkSession().conf().get.return_value = policy
    return query


@pytest.mark.parametrize(
    ("policy", "marks", "holder"),
    [
        ("min", {"a": 5, "b": 3}, "b"),
        ("max", {"a": 5, "b": 3}, "a"),
        ("min", {"a": 5, "b": None}, "b"),
        ("min", {}, None),
    ],
)
def test_the_source_of_the_deciding_watermark(
    policy: str, marks: dict[str, int | None], holder: str | None
) -> None:
    """The least one, unless the script has chosen the greatest."""
    assert find_watermark_holder(_query(policy, **marks)) == holder


def test_the_plan_is_read_once() -> None:
    """It stays as it is for the run of a query, and each look is a call into the JVM."""
    query = _query("min", a=5, b=3)
    for _ in range(3):
        assert find_watermark_holder(query) == "b"
    assert query._jsq.streamingQuery().logicalPlan.call_count == 1


def test_a_spark_that_keeps_it_elsewhere() -> None:
    """Nothing is named, and the batch is sealed."""
    query = MagicMock()
    query._jsq.streamingQuery.side_effect = RuntimeError("no such method")
    assert find_watermark_holder(query) is None
    assert find_watermark_holder(None) is None


def test_a_report_costs_two_calls_into_the_jvm() -> None:
    """PySpark's own listener makes some hundreds before it calls one in Python."""
    reports = SparkReports()
    started, progress, ended = MagicMock(), MagicMock(), MagicMock()
    started.runId().toString.return_value = ended.runId().toString.return_value = "run"
    started.name.return_value = "q"
    progress.progress().json.return_value = '{"name": "q", "batchId": 3, "sources": []}'
    progress.reset_mock()
    ended.exception().get.return_value = "it failed"
    reports.onQueryStarted(started)
    reports.onQueryProgress(progress)
    assert len(progress.mock_calls) == 2
    assert reports.find("q", 3) == BatchReport()
    reports.onQueryTerminated(ended)
    assert reports.failures == {"q": "it failed"}
    ended.exception().isDefined.return_value = False
    reports.onQueryTerminated(ended)
    assert reports.failures == {"q": "it failed"}
