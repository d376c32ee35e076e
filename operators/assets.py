"""Sealed checkpoints, late rows, barriers and closed windows as Airflow assets."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import Asset, AssetWatcher
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.row_counts import RowCounts
from tidegate.checkpoints.shared_documents import SharedDocument, change_document, read_document
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TidegateError
from tidegate.json_types import JsonObject
from tidegate.time_units import TICK_MAX, TICK_MIN

from .pipeline_operator import PipelineOperator, PipelineTrigger
from .store_guard import find_looks

_SEAL_POLL_SECONDS = 5.0
_MAX_SLOTS_PER_LOOK = 200  # epochs read in one look; each costs a GET


def stream_asset(pipeline: str, kind: str, every: float, conn_id: str | None = None) -> Asset:
    """Return the asset of one kind of event, with its watcher: schedule your DAGs on it.

    Args:
        pipeline: its name.
        kind: `sealed` (a checkpoint), `late` (rows came late), `barrier` (one has closed),
            `frontier` (it has moved).
        every: at most one event in so many seconds; of kind `barrier` one for each that has closed
            meanwhile.
        conn_id: Airflow connection of the store; None for the environment.
    """
    trigger = SealTrigger(pipeline=pipeline, kind=kind, every=every, conn_id=conn_id)
    return Asset(
        name=f"{pipeline}.{kind}",
        uri=f"tidegate://{pipeline}/{kind}",
        group="tidegate",
        watchers=[AssetWatcher(name=f"{pipeline}.{kind}", trigger=trigger)],
    )


@dataclass(kw_only=True, eq=False, repr=False)
class SealTrigger(PipelineTrigger, BaseEventTrigger):
    """Yields events when new checkpoints bring something of its kind; never ends.

    It looks every 5 s; at its start and after an event it waits `every` seconds. The asset's state
    store keeps the last position once its events were taken, so a triggerer that is killed loses
    no event; the next one may repeat the last.

    Attributes:
        kind: of the events, as for `stream_asset`.
        every: seconds.
    """

    kind: str
    every: float

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield events as long as the triggerer runs this."""
        looks = find_looks(await asyncio.to_thread(self.open_store))
        log = SlotLog(looks.store, self.pipeline)
        before = await asyncio.to_thread(self._load_last_position)
        saved = before
        # Sleep first: a stream that has just begun has nothing to check yet.
        await asyncio.sleep(self.every)
        while True:
            reported = False
            for position, events in await looks.run(self.find_events, log, before):
                before = position
                for event in events:
                    reported = True
                    yield TriggerEvent(event)  # type: ignore[no-untyped-call]  # Airflow's
                # Saved after the triggerer took the events: a kill must not lose them.
                if events or _has_moved_far(saved, position):
                    await asyncio.to_thread(self._save_last_position, position)
                    saved = position
            await asyncio.sleep(self.every if reported else _SEAL_POLL_SECONDS)

    def find_events(
        self, log: SlotLog, before: JsonObject | None
    ) -> list[tuple[JsonObject, list[JsonObject]]]:
        """Return positions after `before`, each with the events that it brings.

        Of kind `barrier` the positions of at most 200 epochs, of other kinds at most the newest
        one. Empty while the store does not answer.
        """
        try:
            newest = log.head().record
        except TidegateError:  # the log may be under repair, too: look again later
            newest = None
        if newest is None:
            return []
        if self.kind != "barrier":
            found = has_new_event(self.kind, newest, before)
            return [(_extract_event_position(newest), [self._make_event(newest)])] if found else []
        # Barriers are in the epoch that closed them, so every epoch is read.
        return [
            (
                _extract_event_position(manifest),
                [
                    self._make_event(manifest, barrier=b.get("id"), outcome=b.get("outcome"))
                    for b in manifest.barriers
                    if not b.get("tardy")  # such a row is about a barrier that closed before
                ],
            )
            for manifest in _read_new_manifests(log, newest, before)
        ]

    def _make_event(self, manifest: Manifest, **facts: Any) -> JsonObject:
        checkpoint = str(manifest.id)
        return {"pipeline": self.pipeline, "checkpoint": checkpoint, "kind": self.kind, **facts}

    def _load_last_position(self) -> JsonObject | None:
        store = self.asset_state_store
        position = store.get(self.kind) if store is not None else None
        return position if isinstance(position, dict) else None

    def _save_last_position(self, position: JsonObject) -> None:
        if self.asset_state_store is not None:
            self.asset_state_store.set(self.kind, position)


def has_new_event(kind: str, newest: Manifest, before: JsonObject | None) -> bool:
    """Return whether the newest checkpoint has an event of this kind after the position `before`.

    Counters are cumulative, and a restore begins again from zero; a frontier from none.
    """
    now = _extract_event_position(newest)
    if before is None or before["timeline"] != now["timeline"]:
        before = {}
    field = "slot" if kind == "sealed" else kind
    # An event time may lie before 1970, so a frontier has no zero to begin from.
    return bool(now[field] > before.get(field, TICK_MIN if kind == "frontier" else 0))


def _extract_event_position(manifest: Manifest) -> JsonObject:
    return {
        "timeline": manifest.timeline,
        "slot": manifest.slot,
        "late": RowCounts.of_sources(manifest.counters.per_source).late_rows,
        "frontier": manifest.frontier_after,
    }


def _read_new_manifests(
    log: SlotLog, newest: Manifest, before: JsonObject | None
) -> list[Manifest]:
    """The epochs after a position, oldest first; the newest one if there is no position."""
    first = newest.slot
    if before is not None:
        # What a restore has begun again is new as well.
        begun = [s.first for s in log.lineage(newest.timeline) if s.timeline > before["timeline"]]
        first = min([before["slot"] + 1, *begun])
    last = min(newest.slot, first + _MAX_SLOTS_PER_LOOK - 1)
    try:
        records = [s.record for s in log.epochs_between(newest.timeline, first, last)]
    except TidegateError:
        return []  # the position stays, so that the next look reads the same epochs
    return [record for record in records if isinstance(record, Manifest)]


def _has_moved_far(saved: JsonObject | None, position: JsonObject) -> bool:
    """Whether a restarted triggerer would have to read many epochs again."""
    return saved is None or abs(position["slot"] - saved["slot"]) >= _MAX_SLOTS_PER_LOOK


# Closed windows as asset partitions: a user's DAG runs once per period that the stream has closed.
#
# A period is closed when the frontier has passed its end: every window that ends in it has its
# first result. Late rows revise windows afterwards, as long as the spec's lateness allows; DAGs
# that must not see revisions are scheduled on a longer period.
#
# The bucket keeps what was announced, so neither a restart nor a second task announces a period
# twice. A restore takes periods back; they are announced again when they close again.

MAX_PERIODS = 200  # announced by one run; the next runs go on while a stream catches up
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class AnnouncedPeriods(SharedDocument):
    """The content of `announced.json`.

    Attributes:
        upto: all periods before this instant were announced, in ticks; None before the first.
        run: the run that announced the newest periods. Airflow records them only when its task
            succeeds, so another try of the same run announces them again.
        begin: start of the first of these periods.
    """

    upto: int | None = None
    run: str | None = None
    begin: int | None = None


def window_asset(pipeline: str, window: str) -> Asset:
    """Return the asset of a window's closed periods, for `PartitionedAssetTimetable(assets=...)`.

    Args:
        pipeline: its name; the spec says `supervision: {announce: 1h}`, which is the period.
        window: name of the window.
    """
    return Asset(
        name=f"{pipeline}.{window}", uri=f"tidegate://{pipeline}/windows/{window}", group="tidegate"
    )


class ClosedWindowsOperator(PipelineOperator):
    """Adds a partition to the assets of all windows for each period closed since the last run.

    At most `MAX_PERIODS` in one run; the next runs add the others.

    Args:
        windows: names of the pipeline's windows.
        period: ticks.
    """

    ui_color = "#d9e4f5"

    def __init__(
        self, *, pipeline: str, windows: Sequence[str], period: int, **kwargs: Any
    ) -> None:
        self.assets = [window_asset(pipeline, window) for window in windows]
        super().__init__(pipeline=pipeline, outlets=self.assets, **kwargs)
        self.period = period

    def execute(self, context: Any) -> list[str]:
        """Announce; the partition keys are the task's result."""
        log = self.open_log()
        key = BucketLayout(self.pipeline).announced_key
        announced = read_document(log.store, key, AnnouncedPeriods)[0] or AnnouncedPeriods()
        run, before = str(context["run_id"]), announced.upto
        frontier = _read_frontier(log.head().record)
        if run == announced.run:  # a try of this run was killed after it had noted its periods
            periods = list_closed_periods(announced.begin, before, self.period)
        else:
            begin = before if before is not None else _read_first_frontier(log)
            periods = list_closed_periods(begin, frontier, self.period)
        keys = [format_partition_key(start) for start in periods]
        for asset in self.assets if keys else ():
            context["outlet_events"][asset].add_partitions(keys)
        self.log.info("closed since the last run: %s", ", ".join(keys) or "none")
        upto: int | None = None
        if periods:
            upto = periods[-1] + self.period
        elif before is not None and frontier is not None and frontier < before:
            # A restore has moved the frontier back: periods from here on close again.
            upto = frontier // self.period * self.period
        if upto is not None and run != announced.run:
            facts = {"upto": upto, "run": run, "begin": periods[0] if periods else None}
            change_document(
                log.store,
                key,
                AnnouncedPeriods(),
                lambda document: document.model_copy(update=facts),
            )
        return keys


def list_closed_periods(begin: int | None, frontier: int | None, period: int) -> list[int]:
    """Return the starts of the periods that end after `begin` and not after the frontier.

    In ticks, oldest first, at most `MAX_PERIODS`; none if `begin` or the frontier is None.
    """
    if begin is None or frontier is None:
        return []
    first, last = begin // period, frontier // period
    return [number * period for number in range(first, min(last, first + MAX_PERIODS))]


def format_partition_key(start: int) -> str:
    """Return the start of a period (ticks) in UTC, as Airflow's own partition mappers read it."""
    return f"{_UNIX_EPOCH + timedelta(microseconds=start):%Y-%m-%dT%H:%M:%S}"


def _read_first_frontier(log: SlotLog) -> int | None:
    """The frontier of the first epoch; of the newest one if the first was retired."""
    head = log.head()
    for slot in log.epochs_between(head.timeline, 1, head.slot):
        frontier = _read_frontier(slot.record if isinstance(slot.record, Manifest) else head.record)
        if frontier is not None:
            return frontier
    return None


def _read_frontier(manifest: Manifest | None) -> int | None:
    # The end of all sources (TICK_MAX) closes everything at once, but no period by name.
    frontier = manifest.frontier_after if manifest else TICK_MIN
    return frontier if TICK_MIN < frontier < TICK_MAX else None
