"""Sealed checkpoints, late rows and troubled barriers as Airflow assets, so that checks run when there is something to check."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from airflow.sdk import Asset, AssetWatcher
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from tidegate.checkpoints.log import SlotLog
from tidegate.checkpoints.manifest import Manifest
from tidegate.jobs.spec.errors import TidegateError
from tidegate.operators.access import StoreAccess

__all__ = ["SealTrigger", "has_new_event", "stream_asset"]

_SEAL_POLL_SECONDS = 5.0  # seconds


def stream_asset(pipeline: str, kind: str, every: float, conn_id: str | None = None) -> Asset:
    """The asset of one kind of event of a pipeline, with its watcher: schedule your own DAGs on it.

    Args:
        pipeline: its name.
        kind: `sealed` (a checkpoint), `late` (rows came late), `barrier` (one closed incomplete or aborted), `frontier` (it
            has moved).
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
    """Yields for ever: one event when the newest checkpoint brings something of its kind, at most one per `every` seconds.

    The last position told is kept in the asset's state store, so a restarted triggerer neither repeats nor skips.
    """

    def __init__(self, *, pipeline: str, kind: str, every: float, conn_id: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow's
        self.pipeline, self.kind, self.every, self.conn_id = pipeline, kind, every, conn_id

    def serialize(self) -> tuple[str, dict[str, Any]]:
        names = ("pipeline", "kind", "every", "conn_id")
        return f"{type(self).__module__}.{type(self).__name__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        log = await asyncio.to_thread(self._open_log)
        before = await asyncio.to_thread(self._load_last_position)
        while True:
            await asyncio.sleep(self.every)  # first: a stream that has just begun has nothing to check yet
            newest = await asyncio.to_thread(_read_newest_manifest, log)
            while newest is None or not has_new_event(self.kind, newest, before):
                await asyncio.sleep(_SEAL_POLL_SECONDS)
                newest = await asyncio.to_thread(_read_newest_manifest, log)
            before = _extract_event_position(newest)
            await asyncio.to_thread(self._save_last_position, before)
            yield TriggerEvent({"pipeline": self.pipeline, "checkpoint": str(newest.id), "kind": self.kind})  # type: ignore[no-untyped-call]

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
    """Whether the newest checkpoint brings something of this kind since the mark; counters are cumulative."""
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
        "frontier": manifest.decision.get("frontier_after") or 0,
    }


def _read_newest_manifest(log: SlotLog) -> Manifest | None:
    try:
        return log.head().record
    except TidegateError:
        return None  # the store is away, or the log is being repaired: look again later
