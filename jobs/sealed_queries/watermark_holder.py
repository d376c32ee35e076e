"""Finds the source that decides the watermark of a query, which Spark's reports do not name.

Spark keeps one watermark per `withWatermark` of the query. The objects that hold them are internal:
read on Spark 4.1.3 (`WatermarkTracker`, `EventTimeWatermark.nodeId`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import structlog

_POLICY: Final = "spark.sql.streaming.multipleWatermarkPolicy"  # min unless set to max

_log = structlog.get_logger("tidegate.job")


def find_watermark_holder(query: Any) -> str | None:
    """Return Spark's descriptions of the sources behind the watermark that decides.

    Args:
        query: of PySpark; None before it has started.

    Returns:
        None without a watermark, or if this Spark keeps it elsewhere.
    """
    if query is None:
        return None
    try:
        execution = query._jsq.streamingQuery()
        known = execution.watermarkTracker().watermarkMap()
        marks = []
        for node, sources in _list_watermarks(execution.logicalPlan()):
            mark = known.apply(node.nodeId())
            marks.append((mark.get() if mark.isDefined() else 0, sources))
        policy = execution.sparkSession().conf().get(_POLICY, "min")
    except Exception as error:  # py4j raises whatever another Spark, or one that ends, gives it
        _log.debug("watermark_holder_unknown", why=str(error)[:200])
        return None
    choose = max if policy == "max" else min
    return choose(marks, key=lambda one: one[0])[1] if marks else None


def _list_watermarks(plan: Any) -> Iterator[tuple[Any, str]]:
    """Yield the watermarks of a logical plan, each with the sources below it."""
    if plan.nodeName() == "EventTimeWatermark":
        yield plan, " + ".join(_list_sources(plan))
    for child in _list_children(plan):
        yield from _list_watermarks(child)


def _list_sources(plan: Any) -> list[str]:
    """List the sources below a node of a logical plan."""
    children = _list_children(plan)
    if children:
        return [source for child in children for source in _list_sources(child)]
    if not plan.isStreaming():
        return []  # a table that the script joins
    reader = plan.source if plan.nodeName() == "StreamingExecutionRelation" else plan.stream
    return [str(reader().toString())]


def _list_children(plan: Any) -> list[Any]:
    children = plan.children()
    return [children.apply(number) for number in range(children.size())]
