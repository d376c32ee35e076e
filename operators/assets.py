"""Sealed checkpoints, late rows and troubled barriers as Airflow assets, so that checks run when there is something to check."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from airflow.sdk import Asset, AssetWatcher, BaseOperator
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.shared_documents import SharedDocument, change_document, read_document
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TidegateError
from tidegate.operators.store_access import StoreAccess
from tidegate.time_units import TICK_MAX, TICK_MIN

_SEAL_POLL_SECONDS = 5.0  # seconds


def stream_asset(pipeline: str, kind: str, every: float, conn_id: str | None = None) -> Asset:
    """The asset of one kind of event of a pipeline, with its watcher: schedule your own DAGs on it.

    Args:
        pipeline: its name.
        kind: `sealed` (a checkpoint), `late` (rows came late), `barrier` (one closed incomplete or
            aborted), `frontier` (it has moved).
        every: at most one event in so many seconds.
        conn_id: Airflow connection of the store.
    """
    trigger = SealTrigger(pipeline=pipeline, kind=kind, every=every, conn_id=conn_id)
    return Asset(
        name=f"{pipeline}.{kind}",
        uri=f"tidegate://{pipeline}/{kind}",
        group="tidegate",
        watchers=[AssetWatcher(name=f"{pipeline}.{kind}", trigger=trigger)],
    )


class SealTrigger(BaseEventTrigger):
    """Yields for ever.

    One event when the newest checkpoint brings something of its kind, at most one per `every`
    seconds.

    The last position told is kept in the asset's state store, so a restarted triggerer neither
    repeats nor skips.
    """

    def __init__(
        self, *, pipeline: str, kind: str, every: float, conn_id: str | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow's
        self.pipeline, self.kind, self.every, self.conn_id = pipeline, kind, every, conn_id

    def serialize(self) -> tuple[str, dict[str, Any]]:
        names = ("pipeline", "kind", "every", "conn_id")
        return f"{type(self).__module__}.{type(self).__name__}", {
            name: getattr(self, name) for name in names
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        log = await asyncio.to_thread(self._open_log)
        before = await asyncio.to_thread(self._load_last_position)
        while True:
            await asyncio.sleep(
                self.every
            )  # first: a stream that has just begun has nothing to check yet
            newest = await asyncio.to_thread(_read_newest_manifest, log)
            while newest is None or not has_new_event(self.kind, newest, before):
                await asyncio.sleep(_SEAL_POLL_SECONDS)
                newest = await asyncio.to_thread(_read_newest_manifest, log)
            before = _extract_event_position(newest)
            await asyncio.to_thread(self._save_last_position, before)
            yield TriggerEvent(
                {"pipeline": self.pipeline, "checkpoint": str(newest.id), "kind": self.kind}
            )  # type: ignore[no-untyped-call]

    def _open_log(self) -> SlotLog:
        return SlotLog(StoreAccess.resolve(self.conn_id).open_shared(), self.pipeline)

    def _load_last_position(self) -> dict[str, Any] | None:
        store = self.asset_state_store
        found = store.get(self.kind) if store is not None else None
        return found if isinstance(found, dict) else None

    def _save_last_position(self, mark: dict[str, Any]) -> None:
        if self.asset_state_store is not None:
            self.asset_state_store.set(self.kind, mark)


def has_new_event(kind: str, newest: Manifest, before: dict[str, Any] | None) -> bool:
    """Whether the newest checkpoint brings something of this kind since the mark.

    Counters are cumulative.
    """
    mark = _extract_event_position(newest)
    if before is None or before["timeline"] != mark["timeline"]:
        before = {"timeline": mark["timeline"], "slot": 0, "late": 0, "barrier": 0, "frontier": 0}
    field = "slot" if kind == "sealed" else kind
    return bool(mark[field] > before.get(field, 0))


def _extract_event_position(manifest: Manifest) -> dict[str, Any]:
    troubled = [b for b in manifest.barriers if b.get("outcome") in ("incomplete", "aborted")]
    return {
        "timeline": manifest.timeline,
        "slot": manifest.slot,
        "late": manifest.counters.late,
        "barrier": manifest.slot if troubled else 0,
        "frontier": manifest.frontier_after,
    }


def _read_newest_manifest(log: SlotLog) -> Manifest | None:
    try:
        return log.head().record
    except TidegateError:
        return None  # the store is away, or the log is being repaired: look again later


# Closed windows as asset partitions: DAGs of your own run once per period that the stream has
# closed.
#
# A period is closed when the frontier has passed its end: every window that ends in it has its
# first result. Rows that come late revise windows afterwards, as long as the spec's lateness
# allows; whoever must not see that schedules on a longer period.
#
# What was announced stands in the bucket, so neither a restart nor a second task announces a period
# twice. A restore takes periods back; they are announced again when they close again.

MAX_PERIODS: Final = (
    200  # periods announced by one run; a stream that catches up is followed by the next runs
)
_UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class AnnouncedPeriods(SharedDocument):
    """The bytes of `announced.json`.

    All periods before this instant were announced, in ticks; None before the first.
    """

    upto: int | None = None


def window_asset(pipeline: str, window: str) -> Asset:
    """The asset of a window's closed periods, for `PartitionedAssetTimetable(assets=...)`.

    Args:
        pipeline: its name; the spec says `supervision: {announce: 1h}`, which is the period.
        window: name of the window.
    """
    return Asset(
        name=f"{pipeline}.{window}", uri=f"tidegate://{pipeline}/windows/{window}", group="tidegate"
    )


class ClosedWindowsOperator(BaseOperator):
    """Adds a partition to the assets of all windows for every period that closed since the last run.

    Args:
        pipeline: name of the pipeline.
        windows: names of its windows.
        period: ticks.
        conn_id: Airflow connection of the store; None for the environment.
    """

    ui_color = "#d9e4f5"

    def __init__(
        self,
        *,
        pipeline: str,
        windows: Sequence[str],
        period: int,
        conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
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
        upto = (
            periods[-1] + self.period
            if periods
            else _rewind_announced(before, _read_frontier(log.head().record), self.period)
        )
        if upto is not None:
            change_document(
                log.store,
                key,
                AnnouncedPeriods(),
                lambda found: found.model_copy(update={"upto": upto}),
            )
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
    """After a restore the frontier stands before what was announced.

    From there it will be announced again.
    """
    if before is None or frontier is None or frontier >= before:
        return None
    return frontier // period * period


def _read_first_frontier(log: SlotLog) -> int | None:
    """Where the stream began; where it stands when that is no longer known."""
    head = log.head()
    for found in log.epochs_between(head.timeline, 1, head.slot):
        frontier = _read_frontier(
            found.record if isinstance(found.record, Manifest) else head.record
        )
        if frontier is not None:
            return frontier
    return None


def _read_frontier(manifest: Manifest | None) -> int | None:
    # The end of all sources (TICK_MAX) closes everything at once, but no period by name.
    frontier = manifest.frontier_after if manifest else TICK_MIN
    return frontier if TICK_MIN < frontier < TICK_MAX else None
