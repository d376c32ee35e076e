"""What the page shows of one stream, read from the bucket: plain data, times in milliseconds since 1970."""

from __future__ import annotations

import threading
from typing import Any, Final

from tidegate.checkpoints.canonical import parse_json
from tidegate.checkpoints.catalog import Catalog
from tidegate.checkpoints.desired import DesiredState, read_desired
from tidegate.checkpoints.layout import Layout
from tidegate.checkpoints.lease import LeaseView, LeaseWatch
from tidegate.checkpoints.log import Head, SlotLog
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.requests import pending
from tidegate.checkpoints.restore import plan_restore
from tidegate.checkpoints.roots import RootsFile
from tidegate.checkpoints.store import NotFoundError, Store
from tidegate.jobs.spec.errors import TidegateError
from tidegate.jobs.spec.time import TICK_MAX, TICK_MIN
from tidegate.operators.observe import status_of

__all__ = ["StreamView", "impact", "point_of", "state_word"]

POINTS: Final = 120  # epochs in the charts
PAGE: Final = 50  # checkpoints in one answer


class StreamView:
    """Reads one stream; remembers what cannot change, so that a refresh costs a handful of small GETs."""

    def __init__(self, store: Store, pipeline: str) -> None:
        self.store, self.pipeline = store, pipeline
        self.log = SlotLog(store, pipeline)
        self._watch = LeaseWatch(store, pipeline)
        self._points: dict[tuple[int, int], dict[str, Any]] = {}
        self._lock = threading.Lock()

    def summary(self) -> dict[str, Any]:
        """One row of the list. A store that does not answer is a state like any other."""
        try:
            with self._lock:
                return self._summary(self.log.head())
        except TidegateError as error:
            return {"pipeline": self.pipeline, "state": "unknown", "why": error.message}

    def detail(self) -> dict[str, Any]:
        """Everything about the stream but older checkpoints."""
        with self._lock:
            head = self.log.head()
            points = self._recent(head)
            return {
                **self._summary(head),
                "points": points,
                "barriers": [barrier for point in reversed(points) for barrier in point["barriers"]][:40],
                "requests": [r.model_dump(mode="json") for r in pending(self.store, self.pipeline)],
                "restores": [_restore(fork.model_dump()) for fork in reversed(self.log.forks())],
                "pins": {p.checkpoint: name for name, p in RootsFile(self.store, self.pipeline).read().pins.items()},
                "quality": self._quality(),
            }

    def checkpoints(self, offset: int) -> list[dict[str, Any]]:
        """A page of the checkpoint table, newest first."""
        rows = Catalog(self.log).listing(all_timelines=True)[offset : offset + PAGE]
        return [
            {
                "id": row.id,
                "timeline": row.timeline,
                "slot": row.slot,
                "at": row.created_at // 1000,
                "read": row.read,
                "late": row.late,
                "bytes": row.bytes,
                "pins": row.pins,
                "condemned": row.condemned,
                "on_lineage": row.on_lineage,
                "restorable": row.restorable,
            }
            for row in rows
        ]

    def _summary(self, head: Head) -> dict[str, Any]:
        lease = self._watch.look()
        alive = not self._watch.expired(lease)
        status = status_of(self.store, self.pipeline) or {}
        desired = read_desired(self.store, self.pipeline)
        state, why = state_word(desired.state, alive, lease, status)
        manifest = head.record
        return {
            "pipeline": self.pipeline,
            "state": state,
            "why": why,
            "desired": {"state": desired.state.value, "who": desired.who, "why": desired.why, "at": desired.at // 1000},
            "driver": _driver(lease) if alive else None,
            "step": status.get("step") if alive else None,
            "unpublished": status.get("unpublished"),
            "holder": _holder(status, manifest),
            "error": status.get("error"),
            "checkpoint": str(manifest.id) if manifest else None,
            "timeline": head.timeline,
            "slot": head.slot,
            "sealed_at": manifest.created_at // 1000 if manifest else None,
            "latest": point_of(manifest) if manifest else None,
        }

    def _recent(self, head: Head) -> list[dict[str, Any]]:
        """The newest epochs of the lineage, oldest first."""
        lineage = self.log.lineage(head.timeline)
        points = []
        for slot in range(max(1, head.slot - POINTS + 1), head.slot + 1):
            home = next((s.timeline for s in lineage if s.holds(slot)), None)
            point = None if home is None else self._point(home, slot)
            if point is not None:
                points.append(point)
        self._points = {(p["timeline"], p["slot"]): p for p in points}  # forget what has left the charts
        return points

    def _point(self, timeline: int, slot: int) -> dict[str, Any] | None:
        known = self._points.get((timeline, slot))
        if known is not None:
            return known
        filled = self.log.read(timeline, slot)
        return point_of(filled.record) if filled is not None and isinstance(filled.record, Manifest) else None

    def _quality(self) -> dict[str, Any] | None:
        try:
            found = parse_json(self.store.get(f"{Layout(self.pipeline).quality}results/latest.json").data)
        except (NotFoundError, ValueError):
            return None
        names = ("at", "verdict", "checkpoint", "failed", "docs")
        return {name: found.get(name) for name in names}


def state_word(desired: DesiredState, alive: bool, lease: LeaseView | None, status: dict[str, Any]) -> tuple[str, str]:
    """The stream's state in one word, and why."""
    said = str(status.get("state") or "")
    current = lease is not None and status.get("token") == lease.token
    if desired is DesiredState.RECOVERING:
        return "recovering", "a restore is under way"
    if alive:
        if current and said in ("waiting", "starting", "draining"):
            return said, str(status.get("why") or "")
        return "running", ""
    if said == "failed" and current:
        return "failed", str((status.get("error") or {}).get("message", ""))
    if said == "finished" and current:
        return "finished", str(status.get("why") or "all sources are done")
    if desired is DesiredState.STOPPED:
        return "stopped", str(status.get("why") or "") if current else ""
    return "down", "it should run, and nobody drives it"


def point_of(manifest: Manifest) -> dict[str, Any]:
    """One epoch in the charts."""
    decision, inputs = manifest.decision, manifest.decider.get("output", {}).get("inputs", {})
    counters = manifest.counters
    return {
        "id": str(manifest.id),
        "timeline": manifest.timeline,
        "slot": manifest.slot,
        "at": manifest.created_at // 1000,
        "frontier": _ms(decision.get("frontier_after")),
        "members": {name: _ms(state["frontier"]) for name, state in inputs.items()},
        "statuses": {name: state["status"] for name, state in inputs.items()},
        "read": counters.read,
        "released": counters.released,
        "late": counters.late,
        "retained": counters.retained,
        "dead": counters.dead_lettered,
        "sources": counters.per_source,
        "seconds": round(sum(manifest.timings.values()), 3),
        "steps": manifest.timings,
        "barriers": [_barrier(b, str(manifest.id)) for b in manifest.barriers],
    }


def impact(log: SlotLog, checkpoint: str) -> dict[str, Any]:
    """What a restore to this checkpoint would take back."""
    return plan_restore(log, Catalog(log).resolve(checkpoint)).model_dump()


def _barrier(row: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    opened, closed = int(row.get("opened") or 0), int(row.get("closed") or 0)
    names = ("id", "outcome", "types", "missing", "tardy", "ended", "homogeneous")
    facts = {name: row.get(name) for name in names}
    return {**facts, "waited": (closed - opened) / 1e6, "at": closed // 1000, "checkpoint": checkpoint}


def _restore(fork: dict[str, Any]) -> dict[str, Any]:
    names = ("timeline", "slot", "new_timeline", "fork_slot", "who", "why", "recover_to")
    return {**{name: fork[name] for name in names}, "at": fork["at"] // 1000}


def _holder(status: dict[str, Any], manifest: Manifest | None) -> dict[str, Any] | None:
    found = status.get("holder") or (manifest.decision.get("holder") if manifest else None)
    if not isinstance(found, dict):
        return None
    return {"member": found.get("member"), "why": found.get("why"), "since": _ms(found.get("since"))}


def _driver(lease: LeaseView | None) -> dict[str, Any] | None:
    if lease is None or lease.holder is None:
        return None
    return {"pid": lease.holder.pid, "host": lease.holder.host, "token": lease.token}


def _ms(ticks: Any) -> int | None:
    """Milliseconds, or None for no instant and for both infinities."""
    return ticks // 1000 if isinstance(ticks, int) and TICK_MIN < ticks < TICK_MAX else None
