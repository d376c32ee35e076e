"""Closed windows as asset partitions: DAGs of your own run once per period that the stream has closed.

A period is closed when the frontier has passed its end: every window that ends in it has its first result. Rows that come late
revise windows afterwards, as long as the spec's lateness allows; whoever must not see that schedules on a longer period.

What was announced stands in the bucket, so neither a restart nor a second task announces a period twice. A restore takes periods
back; they are announced again when they close again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from airflow.sdk import Asset, BaseOperator

from tidegate.checkpoints.documents import SharedDocument, change_document, read_document
from tidegate.checkpoints.layout import BucketLayout
from tidegate.checkpoints.log import SlotLog
from tidegate.checkpoints.manifest import Manifest
from tidegate.jobs.spec.time import TICK_MAX, TICK_MIN
from tidegate.operators.access import StoreAccess

__all__ = ["ClosedWindowsOperator", "list_closed_periods", "format_partition_key", "window_asset"]

MAX_PERIODS: Final = 200  # periods announced by one run; a stream that catches up is followed by the next runs
_UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class AnnouncedPeriods(SharedDocument):
    """The bytes of `announced.json`: all periods before this instant were announced, in ticks; None before the first."""

    upto: int | None = None


def window_asset(pipeline: str, window: str) -> Asset:
    """The asset of a window's closed periods, for `PartitionedAssetTimetable(assets=...)`.

    Args:
        pipeline: its name; the spec says `supervision: {announce: 1h}`, which is the period.
        window: name of the window.
    """
    return Asset(name=f"{pipeline}.{window}", uri=f"tidegate://{pipeline}/windows/{window}", group="tidegate")


class ClosedWindowsOperator(BaseOperator):
    """Adds a partition to the assets of all windows for every period that closed since the last run.

    Args:
        pipeline: name of the pipeline.
        windows: names of its windows.
        period: ticks.
        conn_id: Airflow connection of the store; None for the environment.
    """

    ui_color = "#d9e4f5"

    def __init__(self, *, pipeline: str, windows: Sequence[str], period: int, conn_id: str | None = None, **kwargs: Any) -> None:
        self.assets = [window_asset(pipeline, window) for window in windows]
        super().__init__(outlets=self.assets, **kwargs)
        self.pipeline, self.period, self.conn_id = pipeline, period, conn_id

    def execute(self, context: Any) -> list[str]:
        """Announce; the partition keys are the task's result."""
        log = SlotLog(StoreAccess.resolve(self.conn_id).open(), self.pipeline)
        key = f"{BucketLayout(self.pipeline).pipeline_prefix}announced.json"
        before = (read_document(log.store, key, AnnouncedPeriods)[0] or AnnouncedPeriods()).upto
        begin = before if before is not None else _read_first_frontier(log)
        periods = list_closed_periods(begin, _read_frontier(log.head().record), self.period)
        keys = [format_partition_key(start) for start in periods]
        for asset in self.assets if keys else ():
            context["outlet_events"][asset].add_partitions(keys)
        self.log.info("closed since the last run: %s", ", ".join(keys) or "none")
        upto = periods[-1] + self.period if periods else _rewind_announced(before, _read_frontier(log.head().record), self.period)
        if upto is not None:
            change_document(log.store, key, AnnouncedPeriods(), lambda found: found.model_copy(update={"upto": upto}))
        return keys


def list_closed_periods(begin: int | None, frontier: int | None, period: int) -> list[int]:
    """Starts of the periods between the two that are over, oldest first, not more than `MAX_PERIODS`."""
    if begin is None or frontier is None:
        return []
    first, last = begin // period, frontier // period
    return [number * period for number in range(first, min(last, first + MAX_PERIODS))]


def format_partition_key(start: int) -> str:
    """The start of a period in UTC, as Airflow's own partition mappers read it."""
    return f"{_UNIX_EPOCH + timedelta(microseconds=start):%Y-%m-%dT%H:%M:%S}"


def _rewind_announced(before: int | None, frontier: int | None, period: int) -> int | None:
    """After a restore the frontier stands before what was announced: from there it will be announced again."""
    if before is None or frontier is None or frontier >= before:
        return None
    return frontier // period * period


def _read_first_frontier(log: SlotLog) -> int | None:
    """Where the stream began; where it stands when that is no longer known."""
    head = log.head()
    for found in log.epochs_between(head.timeline, 1, head.slot):
        frontier = _read_frontier(found.record if isinstance(found.record, Manifest) else head.record)
        if frontier is not None:
            return frontier
    return None


def _read_frontier(manifest: Manifest | None) -> int | None:
    found = manifest.decision.get("frontier_after") if manifest else None
    if not isinstance(found, int) or found <= TICK_MIN:
        return None
    return found if found < TICK_MAX else None  # the end of all sources closes everything at once, but no period by name
