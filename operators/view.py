"""What the page shows of one stream, read from the bucket: plain data, times in milliseconds since 1970."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Final, TypeVar

from tidegate.checkpoints.canonical import parse_json
from tidegate.checkpoints.catalog import Catalog
from tidegate.checkpoints.clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.desired import read_desired
from tidegate.checkpoints.diff import diff
from tidegate.checkpoints.health import healthy
from tidegate.checkpoints.index import SlotIndex, Summary
from tidegate.checkpoints.layout import CheckpointId, Layout
from tidegate.checkpoints.lease import LeaseView, LeaseWatch
from tidegate.checkpoints.log import Filled, Head, SlotLog, Stretch
from tidegate.checkpoints.manifest import ForkRecord, Manifest
from tidegate.checkpoints.requests import pending
from tidegate.checkpoints.restore import plan_restore
from tidegate.checkpoints.roots import RootsFile
from tidegate.checkpoints.status import waiting_messages
from tidegate.checkpoints.store import NotFoundError, Store
from tidegate.checkpoints.trail import read_trails
from tidegate.checkpoints.verify import verify
from tidegate.jobs.spec.errors import TidegateError, TransientError
from tidegate.operators.diagnosis import diagnose, state_word, worst
from tidegate.operators.observe import status_of
from tidegate.operators.points import Sketches, lateness, milliseconds, point_of, sketches_of, unfinished

__all__ = ["PAGE", "POINTS", "StreamView", "unknown"]

POINTS: Final = 120  # epochs in the charts: more than pixels need, few enough to be read in a moment
PAGE: Final = 25  # checkpoints in one answer
WORKERS: Final = 8
BARRIERS: Final = 60
_VERDICT: Final = 15.0  # seconds; a verdict is minutes old when it is new
_LOOK_BACK: Final = 2_000  # epochs searched for barriers when the page is first asked for; four pages of the index

T = TypeVar("T")
_Seen = tuple[dict[str, Any], Summary, Sketches]


def unknown(pipeline: str, error: TidegateError, paused: bool = False, unread: str | None = None) -> dict[str, Any]:
    """The row of a stream whose store says nothing: that is a state like any other."""
    found = {"pipeline": pipeline, "state": "unknown", "why": error.message, "away": isinstance(error, TransientError)}
    return _judged({**found, "paused": paused, "unread": unread})


class StreamView:
    """Reads one stream; remembers what cannot change, so that a refresh costs a handful of small GETs.

    Safe to use from several threads; whoever asks within `fresh` seconds shares one look at the bucket.
    """

    def __init__(self, store: Store, pipeline: str, *, fresh: float = 1.5, clock: Clock = SYSTEM_CLOCK) -> None:
        self.store, self.pipeline = store, pipeline
        self.log = SlotLog(store, pipeline)
        self._index = SlotIndex(self.log, workers=WORKERS)
        self._watch = LeaseWatch(store, pipeline, clock)
        self._fresh, self._clock = fresh, clock
        self._seen: dict[tuple[int, int], _Seen | None] = {}
        self._barriers: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._searched: int | None = None  # the timeline whose past was searched for barriers
        self._forks: tuple[int, list[Stretch], list[ForkRecord]] | None = None
        self._verified: dict[str, dict[str, Any]] = {}
        self._kept: dict[str, tuple[float, Any]] = {}
        self._lock = threading.RLock()

    def summary(self, paused: bool = False, unread: str | None = None) -> dict[str, Any]:
        """One row of the list. A store that does not answer is a state like any other.

        Args:
            paused: whether its DAG is.
            unread: why Airflow does not find its DAG at present, `errors` or `missing`.
        """
        try:
            with self._lock:
                found = self._shared("summary", lambda: self._summary(self.log.head()))
        except TidegateError as error:
            return unknown(self.pipeline, error, paused, unread)
        return _judged({**found, "paused": paused, "unread": unread})

    def detail(
        self,
        paused: bool = False,
        since: tuple[int, int] | None = None,
        span: int = POINTS,
        unread: str | None = None,
    ) -> dict[str, Any]:
        """Everything about the stream but older checkpoints.

        Args:
            paused: whether its DAG is.
            unread: as for `summary`.
            since: (timeline, slot) of the newest point the caller has; only newer ones are sent when it is still good.
            span: how many epochs back the charts reach, 0 for all; at most `POINTS` of them are drawn.
        """
        with self._lock:
            head = self.log.head()
            found = self._shared("detail", lambda: self._detail(head))
            recent = self._recent(head)
            points = recent if span == POINTS else self._sampled(head, span)
            partial = since is not None and since[0] == head.timeline and span == POINTS
            newer = [point for point in points if since is None or not partial or point["slot"] > since[1]]
            return _judged({**found, "paused": paused, "unread": unread, "points": newer, "partial": partial})

    def checkpoints(self, before: tuple[int, int] | None = None, *, limit: int = PAGE, abandoned: bool = False) -> dict[str, Any]:
        """A page of the checkpoint table, newest first.

        Args:
            before: (timeline, slot) of the last row of the page before this one, as `next` said.
            limit: rows of a page.
            abandoned: those that restores have left behind, instead of the current lineage.
        """
        with self._lock:
            head = self.log.head()
            source = self._left_behind(head) if abandoned else self._lineage_back(head)
            rows = list(islice((row for row in source if before is None or _follows(row, before, abandoned)), limit + 1))
            pins, condemned = self._marks()
            well = healthy(self.store, self.pipeline) if self._quality() is not None else None
        shown = [self._row(row, pins, condemned, well, not abandoned) for row in rows[:limit]]
        more = [rows[limit - 1].timeline, rows[limit - 1].slot] if len(rows) > limit else None
        return {"rows": shown, "next": more, "newest": head.slot}

    def impact(self, checkpoint: str) -> dict[str, Any]:
        """What a restore to this checkpoint would take back."""
        plan = plan_restore(self.log, Catalog(self.log).resolve(checkpoint))
        return {**plan.model_dump(), "since": milliseconds(plan.since)}

    def diff(self, left: str, right: str) -> dict[str, Any]:
        """What differs between two checkpoints; names and pins are resolved."""
        catalog = Catalog(self.log)
        return diff(*(catalog.show(catalog.resolve(name)) for name in (left, right))).model_dump()

    def verify(self, checkpoint: str) -> dict[str, Any]:
        """Whether everything a checkpoint needs is there in the right size; checksums are left to the restore itself."""
        target = CheckpointId.parse(checkpoint)
        result = verify(self.log, target, checksums=False).model_dump(mode="json")
        self._verified[checkpoint] = {"verdict": result["verdict"], "at": time.time_ns() // 1_000_000}
        return result

    # What does not change from one second to the next is read once for everybody.

    def _shared(self, name: str, look: Callable[[], T], fresh: float | None = None) -> T:
        known = self._kept.get(name)
        now = self._clock.now()
        if known is not None and now - known[0] < (self._fresh if fresh is None else fresh):
            found: T = known[1]
            return found
        try:
            found = look()
        except TransientError:
            # The drivers could not renew either: their silence must not be counted from before the outage.
            self._watch = LeaseWatch(self.store, self.pipeline, self._clock)
            raise
        self._kept[name] = (now, found)
        return found

    def _summary(self, head: Head) -> dict[str, Any]:
        lease = self._watch.look()
        alive = not self._watch.expired(lease)
        status = status_of(self.store, self.pipeline) or {}
        desired = read_desired(self.store, self.pipeline)
        state, why = state_word(desired, alive, lease, status)
        manifest = head.record
        current = lease is not None and status.get("token") == lease.token
        return {
            "pipeline": self.pipeline,
            "state": state,
            "why": why,
            "desired": {"state": desired.state.value, "who": desired.who, "why": desired.why, "at": desired.at // 1000},
            "driver": _driver(lease) if alive else None,
            "step": status.get("step") if alive else None,
            "unpublished": status.get("unpublished") if current else None,
            "trouble": _message(status.get("trouble")) if alive and current else None,
            "silent": {name: ticks // 1_000_000 for name, ticks in (status.get("silent") or {}).items()}
            if alive and current
            else {},
            "lag": waiting_messages(status) if alive and current else {},
            "late_uploads": (status.get("late_uploads") or {}) if alive and current else {},
            "holder": _holder(status, manifest),
            "error": status.get("error") if current else None,
            "checkpoint": str(manifest.id) if manifest else None,
            "timeline": head.timeline,
            "slot": head.slot,
            "sealed_at": manifest.created_at // 1000 if manifest else None,
            "latest": point_of(manifest) if manifest else None,
            "quality": self._shared("quality", self._quality, _VERDICT),
        }

    def _detail(self, head: Head) -> dict[str, Any]:
        recent = self._recent(head)
        seen = [self._seen.get((point["timeline"], point["slot"])) for point in recent]
        roots = RootsFile(self.store, self.pipeline).read()
        return {
            **self._shared("summary", lambda: self._summary(head)),
            "lateness": lateness(found[2] for found in seen if found),
            "barriers": self._barrier_history(head, recent),
            "open_barriers": unfinished(head.record) if head.record else [],
            "requests": [request.model_dump(mode="json") for request in pending(self.store, self.pipeline)],
            "restores": [_restore(fork.model_dump()) for fork in reversed(self._past(head)[1])],
            "trail": [trail.model_dump(mode="json") for trail in read_trails(self.store, self.pipeline)],
            "pins": [{"name": name, **pin.model_dump(), "at": pin.at // 1000} for name, pin in sorted(roots.pins.items())],
        }

    def _quality(self) -> dict[str, Any] | None:
        try:
            found = parse_json(self.store.get(f"{Layout(self.pipeline).quality}results/latest.json").data)
        except (NotFoundError, ValueError):
            return None
        docs = str(found.get("docs") or "").partition("/quality/docs/")[2]
        return {**{name: found.get(name) for name in ("at", "verdict", "checkpoint", "failed")}, "docs": docs or "index.html"}

    # Epochs

    def _recent(self, head: Head) -> list[dict[str, Any]]:
        """The newest epochs of the lineage, oldest first."""
        slots = range(max(1, head.slot - POINTS + 1), head.slot + 1)
        wanted = self._homes(head, slots)
        found = [seen[0] for seen in self._look(wanted) if seen is not None]
        self._seen = {place: self._seen[place] for place in self._seen if place in {*wanted}}  # forget what left the charts
        return found

    def _sampled(self, head: Head, span: int) -> list[dict[str, Any]]:
        """At most `POINTS` epochs, evenly spread over the last `span`; always with the newest."""
        reach = min(span or head.slot, head.slot)
        step = max(1, -(-reach // POINTS))
        slots = [*range(head.slot, head.slot - reach, -step)][::-1]
        known = dict(self._seen)
        found = [seen[0] for seen in self._look(self._homes(head, slots)) if seen is not None]
        self._seen = known
        return found

    def _homes(self, head: Head, slots: range | list[int]) -> list[tuple[int, int]]:
        lineage, _ = self._past(head)
        homes = ((next((s.timeline for s in lineage if s.holds(slot)), None), slot) for slot in slots)
        return [(timeline, slot) for timeline, slot in homes if timeline is not None]

    def _past(self, head: Head) -> tuple[list[Stretch], list[ForkRecord]]:
        """Lineage and restores as of a head; both change only with its timeline."""
        if self._forks is None or self._forks[0] != head.timeline:
            forks = self.log.forks()[: head.timeline]
            self._forks = head.timeline, self.log.lineage(head.timeline), forks
        return self._forks[1:]

    def _look(self, places: list[tuple[int, int]]) -> list[_Seen | None]:
        """What was sealed at these places; reads what it has not seen yet, several at once."""
        missing = [place for place in places if place not in self._seen]
        if missing:
            with ThreadPoolExecutor(WORKERS) as pool:
                self._seen |= dict(zip(missing, pool.map(lambda place: _seen(self.log.read(*place)), missing), strict=True))
        return [self._seen[place] for place in places]

    def _barrier_history(self, head: Head, recent: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The newest closed barriers, newest first; daily ones lie far behind the epochs in the charts."""
        if self._searched != head.timeline:
            lineage = self._lineage_back(head)
            older = [row for row in islice(lineage, _LOOK_BACK) if row.barriers][:BARRIERS]
            places = [(row.timeline, row.slot) for row in older]
            self._barriers = {p: s[0]["barriers"] for p, s in zip(places, self._look(places), strict=True) if s}
            self._searched = head.timeline
        self._barriers |= {(p["timeline"], p["slot"]): p["barriers"] for p in recent if p["barriers"]}
        newest = sorted(self._barriers, key=lambda place: place[1], reverse=True)[:BARRIERS]
        self._barriers = {place: self._barriers[place] for place in newest}
        return [barrier for place in newest for barrier in reversed(self._barriers[place])][:BARRIERS]

    # Checkpoints

    def _lineage_back(self, head: Head) -> Iterator[Summary]:
        """Epochs of the current lineage, newest first: from memory as far as the charts reach, then from the index."""
        recent = self._recent(head)
        for point in reversed(recent):
            seen = self._seen[point["timeline"], point["slot"]]
            if seen is not None:
                yield seen[1]
        oldest = max(1, head.slot - POINTS + 1)
        for stretch in reversed(self._past(head)[0]):
            if stretch.first < oldest:
                yield from (
                    row for row in self._index.newest_first(stretch.timeline) if stretch.holds(row.slot) and row.slot < oldest
                )

    def _left_behind(self, head: Head) -> Iterator[Summary]:
        """Epochs that restores have left behind, newest first."""
        lineage = {stretch.timeline: stretch for stretch in self._past(head)[0]}
        for timeline in reversed(range(head.timeline)):
            stretch = lineage.get(timeline)
            for row in self._index.newest_first(timeline):
                if stretch is not None and stretch.holds(row.slot):
                    break
                if row.kind == "epoch":
                    yield row

    def _marks(self) -> tuple[dict[str, list[str]], dict[str, str]]:
        roots = RootsFile(self.store, self.pipeline).read()
        pins: dict[str, list[str]] = {}
        for name, pin in sorted(roots.pins.items()):
            pins.setdefault(pin.checkpoint, []).append(name)
        return pins, {name: f"{entry.reason}: {entry.detail}" for name, entry in roots.condemned.items()}

    def _row(
        self,
        row: Summary,
        pins: dict[str, list[str]],
        condemned: dict[str, str],
        well: Callable[[CheckpointId], bool] | None,
        on_lineage: bool,
    ) -> dict[str, Any]:
        name = row.id or ""
        return {
            "id": row.id,
            "kind": row.kind,
            "timeline": row.timeline,
            "slot": row.slot,
            "at": row.created_at // 1000,
            "read": row.read,
            "late": row.late,
            "bytes": row.bytes,
            "files": row.files,
            "pins": pins.get(name, []),
            "condemned": condemned.get(name),
            "verified": {"verdict": "damaged"} if name in condemned else self._verified.get(name),
            "healthy": None if well is None or row.kind != "epoch" else well(CheckpointId.parse(name)),
            "on_lineage": on_lineage,
            "restorable": row.kind == "epoch" and name not in condemned,
        }


def _follows(row: Summary, before: tuple[int, int], abandoned: bool) -> bool:
    return (row.timeline, row.slot) < before if abandoned else row.slot < before[1]


def _seen(filled: Filled | None) -> _Seen | None:
    if filled is None or not isinstance(filled.record, Manifest):
        return None
    return point_of(filled.record), Summary.of(filled), sketches_of(filled.record)


def _judged(row: dict[str, Any]) -> dict[str, Any]:
    findings = diagnose(row, time.time_ns() // 1_000_000)
    return {**row, "findings": findings, "tone": worst(row["state"], findings)}


def _restore(fork: dict[str, Any]) -> dict[str, Any]:
    names = ("timeline", "slot", "new_timeline", "fork_slot", "who", "why", "recover_to", "request_id")
    return {**{name: fork[name] for name in names}, "at": fork["at"] // 1000}


def _holder(status: dict[str, Any], manifest: Manifest | None) -> dict[str, Any] | None:
    found = status.get("holder") or (manifest.decision.get("holder") if manifest else None)
    if not isinstance(found, dict):
        return None
    return {"member": found.get("member"), "why": found.get("why"), "since": milliseconds(found.get("since"))}


def _seconds(ticks: dict[str, int] | None) -> dict[str, int]:
    return {name: value // 1_000_000 for name, value in (ticks or {}).items()}


def _driver(lease: LeaseView | None) -> dict[str, Any] | None:
    if lease is None or lease.holder is None:
        return None
    return {"pid": lease.holder.pid, "host": lease.holder.host, "token": lease.token}


def _message(error: Any) -> str | None:
    return str(error.get("message")) if isinstance(error, dict) else str(error) if error else None
