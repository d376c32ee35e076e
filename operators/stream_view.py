"""What the page shows of one stream, read from the bucket.

Plain data, times in milliseconds since 1970.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Final, TypeVar

from tidegate.checkpoints.bucket_layout import BucketLayout, CheckpointId
from tidegate.checkpoints.canonical_json import parse_json
from tidegate.checkpoints.checkpoint_catalog import (
    CheckpointCatalog,
    build_health_check,
    diff_checkpoints,
)
from tidegate.checkpoints.desired_state import read_desired_state
from tidegate.checkpoints.driver_reports import count_waiting_messages
from tidegate.checkpoints.driver_requests import list_pending_requests
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.lease import LeaseObserver, LeaseView
from tidegate.checkpoints.manifest import ForkRecord, Manifest
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.restore import plan_restore, read_restore_audits
from tidegate.checkpoints.slot_index import SlotIndex, SlotSummary
from tidegate.checkpoints.slot_log import LineageSegment, LogHead, SlotContents, SlotLog
from tidegate.checkpoints.store import NotFoundError, Store
from tidegate.checkpoints.verify import verify_checkpoint
from tidegate.errors import TidegateError, TransientError
from tidegate.operators.chart_data import (
    LatenessSketches,
    build_epoch_point,
    build_lateness_charts,
    list_open_barriers,
    read_sketches,
    to_milliseconds,
)
from tidegate.operators.diagnosis import describe_state, diagnose_stream, pick_worst_tone
from tidegate.operators.liveness import read_flat_status

CHART_POINTS: Final = (
    120  # epochs in the charts: more than pixels need, few enough to be read in a moment
)
CHECKPOINTS_PER_PAGE: Final = 25  # checkpoints in one answer
READ_WORKERS: Final = 8
BARRIERS_SHOWN: Final = 60
_QUALITY_FRESH_SECONDS: Final = 15.0  # seconds; a verdict is minutes old when it is new
_BARRIER_LOOK_BACK: Final = (
    2_000  # epochs searched for barriers when the page is first asked for; four pages of the index
)

T = TypeVar("T")
_SeenEpoch = tuple[dict[str, Any], SlotSummary, LatenessSketches]


def build_unknown_row(
    pipeline: str, error: TidegateError, paused: bool = False, unread: str | None = None
) -> dict[str, Any]:
    """The row of a stream whose store says nothing: that is a state like any other."""
    found = {
        "pipeline": pipeline,
        "state": "unknown",
        "why": error.message,
        "away": isinstance(error, TransientError),
    }
    return _add_findings({**found, "paused": paused, "unread": unread})


class StreamView:
    """Reads one stream.

    Remembers what cannot change, so that a refresh costs a handful of small GETs.

    Safe to use from several threads; whoever asks within `fresh` seconds shares one look at the
    bucket.
    """

    def __init__(
        self, store: Store, pipeline: str, *, fresh: float = 1.5, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.store, self.pipeline = store, pipeline
        self.log = SlotLog(store, pipeline)
        self._index = SlotIndex(self.log, workers=READ_WORKERS)
        self._watch = LeaseObserver(store, pipeline, clock)
        self._fresh, self._clock = fresh, clock
        self._seen: dict[tuple[int, int], _SeenEpoch | None] = {}
        self._barriers: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._searched: int | None = None  # the timeline whose past was searched for barriers
        self._forks: tuple[int, list[LineageSegment], list[ForkRecord]] | None = None
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
                found = self._read_shared("summary", lambda: self._read_summary(self.log.head()))
        except TidegateError as error:
            return build_unknown_row(self.pipeline, error, paused, unread)
        return _add_findings({**found, "paused": paused, "unread": unread})

    def detail(
        self,
        paused: bool = False,
        since: tuple[int, int] | None = None,
        span: int = CHART_POINTS,
        unread: str | None = None,
    ) -> dict[str, Any]:
        """Everything about the stream but older checkpoints.

        Args:
            paused: whether its DAG is.
            unread: as for `summary`.
            since: (timeline, slot) of the newest point the caller has; only newer ones are sent
                when it is still good.
            span: how many epochs back the charts reach, 0 for all; at most `CHART_POINTS` of them
                are drawn.
        """
        with self._lock:
            head = self.log.head()
            found = self._read_shared("detail", lambda: self._read_detail(head))
            recent = self._recent_points(head)
            points = recent if span == CHART_POINTS else self._sampled_points(head, span)
            partial = since is not None and since[0] == head.timeline and span == CHART_POINTS
            newer = [
                point
                for point in points
                if since is None or not partial or point["slot"] > since[1]
            ]
            return _add_findings(
                {**found, "paused": paused, "unread": unread, "points": newer, "partial": partial}
            )

    def checkpoint_page(
        self,
        before: tuple[int, int] | None = None,
        *,
        limit: int = CHECKPOINTS_PER_PAGE,
        abandoned: bool = False,
    ) -> dict[str, Any]:
        """A page of the checkpoint table, newest first.

        Args:
            before: (timeline, slot) of the last row of the page before this one, as `next` said.
            limit: rows of a page.
            abandoned: those that restores have left behind, instead of the current lineage.
        """
        with self._lock:
            head = self.log.head()
            source = self._iterate_abandoned(head) if abandoned else self._iterate_lineage(head)
            rows = list(
                islice(
                    (
                        row
                        for row in source
                        if before is None or _is_past_cursor(row, before, abandoned)
                    ),
                    limit + 1,
                )
            )
            pins, condemned = self._read_pins()
            well = (
                build_health_check(self.store, self.pipeline)
                if self._read_quality() is not None
                else None
            )
        shown = [
            self._build_checkpoint_row(row, pins, condemned, well, not abandoned)
            for row in rows[:limit]
        ]
        more = [rows[limit - 1].timeline, rows[limit - 1].slot] if len(rows) > limit else None
        return {"rows": shown, "next": more, "newest": head.slot}

    def restore_impact(self, checkpoint: str) -> dict[str, Any]:
        """What a restore to this checkpoint would take back."""
        plan = plan_restore(self.log, CheckpointCatalog(self.log).resolve(checkpoint))
        return {**plan.model_dump(), "since": to_milliseconds(plan.since)}

    def diff(self, left: str, right: str) -> dict[str, Any]:
        """What differs between two checkpoints; names and pins are resolved."""
        catalog = CheckpointCatalog(self.log)
        return diff_checkpoints(
            *(catalog.read_manifest(catalog.resolve(name)) for name in (left, right))
        ).model_dump()

    def verify(self, checkpoint: str) -> dict[str, Any]:
        """Whether everything a checkpoint needs is there in the right size.

        Checksums are left to the restore itself.
        """
        target = CheckpointId.parse(checkpoint)
        result = verify_checkpoint(self.log, target, checksums=False).model_dump(mode="json")
        self._verified[checkpoint] = {
            "verdict": result["verdict"],
            "at": time.time_ns() // 1_000_000,
        }
        return result

    # What does not change from one second to the next is read once for everybody.

    def _read_shared(self, name: str, look: Callable[[], T], fresh: float | None = None) -> T:
        known = self._kept.get(name)
        now = self._clock.monotonic()
        if known is not None and now - known[0] < (self._fresh if fresh is None else fresh):
            found: T = known[1]
            return found
        try:
            found = look()
        except TransientError:
            # The drivers could not renew either: their silence must not be counted from before the
            # outage.
            self._watch = LeaseObserver(self.store, self.pipeline, self._clock)
            raise
        self._kept[name] = (now, found)
        return found

    def _read_summary(self, head: LogHead) -> dict[str, Any]:
        lease = self._watch.observe()
        alive = not self._watch.is_expired(lease)
        status = read_flat_status(self.store, self.pipeline) or {}
        desired = read_desired_state(self.store, self.pipeline)
        state, why = describe_state(desired, alive, lease, status)
        manifest = head.record
        current = lease is not None and status.get("token") == lease.token
        return {
            "pipeline": self.pipeline,
            "state": state,
            "why": why,
            "desired": {
                "state": desired.state.value,
                "who": desired.who,
                "why": desired.why,
                "at": desired.at // 1000,
            },
            "driver": _describe_driver(lease) if alive else None,
            "step": status.get("step") if alive else None,
            "unpublished": status.get("unpublished") if current else None,
            "trouble": _format_error(status.get("trouble")) if alive and current else None,
            "silent": (
                {name: ticks // 1_000_000 for name, ticks in (status.get("silent") or {}).items()}
                if alive and current
                else {}
            ),
            "lag": count_waiting_messages(status) if alive and current else {},
            "late_uploads": (status.get("late_uploads") or {}) if alive and current else {},
            "holder": _describe_frontier_holder(status, manifest),
            "error": status.get("error") if current else None,
            "checkpoint": str(manifest.id) if manifest else None,
            "timeline": head.timeline,
            "slot": head.slot,
            "sealed_at": manifest.created_at // 1000 if manifest else None,
            "latest": build_epoch_point(manifest) if manifest else None,
            "quality": self._read_shared("quality", self._read_quality, _QUALITY_FRESH_SECONDS),
        }

    def _read_detail(self, head: LogHead) -> dict[str, Any]:
        recent = self._recent_points(head)
        seen = [self._seen.get((point["timeline"], point["slot"])) for point in recent]
        roots = RootsFile(self.store, self.pipeline).read()
        return {
            **self._read_shared("summary", lambda: self._read_summary(head)),
            "lateness": build_lateness_charts(found[2] for found in seen if found),
            "barriers": self._barrier_history(head, recent),
            "open_barriers": list_open_barriers(head.record) if head.record else [],
            "requests": [
                request.model_dump(mode="json")
                for request in list_pending_requests(self.store, self.pipeline)
            ],
            "restores": [
                _describe_restore(fork.model_dump())
                for fork in reversed(self._read_lineage(head)[1])
            ],
            "trail": [
                trail.model_dump(mode="json")
                for trail in read_restore_audits(self.store, self.pipeline)
            ],
            "pins": [
                {"name": name, **pin.model_dump(), "at": pin.at // 1000}
                for name, pin in sorted(roots.pins.items())
            ],
        }

    def _read_quality(self) -> dict[str, Any] | None:
        try:
            found = parse_json(
                self.store.get(
                    f"{BucketLayout(self.pipeline).quality_prefix}results/latest.json"
                ).data
            )
        except (NotFoundError, ValueError):
            return None
        docs = str(found.get("docs") or "").partition("/quality/docs/")[2]
        return {
            **{name: found.get(name) for name in ("at", "verdict", "checkpoint", "failed")},
            "docs": docs or "index.html",
        }

    # Epochs

    def _recent_points(self, head: LogHead) -> list[dict[str, Any]]:
        """The newest epochs of the lineage, oldest first."""
        slots = range(max(1, head.slot - CHART_POINTS + 1), head.slot + 1)
        wanted = self._locate_slots(head, slots)
        found = [seen[0] for seen in self._load_epochs(wanted) if seen is not None]
        self._seen = {
            place: self._seen[place] for place in self._seen if place in {*wanted}
        }  # forget what left the charts
        return found

    def _sampled_points(self, head: LogHead, span: int) -> list[dict[str, Any]]:
        """At most `CHART_POINTS` epochs, evenly spread over the last `span`.

        Always with the newest.
        """
        reach = min(span or head.slot, head.slot)
        step = max(1, -(-reach // CHART_POINTS))
        slots = [*range(head.slot, head.slot - reach, -step)][::-1]
        known = dict(self._seen)
        found = [
            seen[0]
            for seen in self._load_epochs(self._locate_slots(head, slots))
            if seen is not None
        ]
        self._seen = known
        return found

    def _locate_slots(self, head: LogHead, slots: range | list[int]) -> list[tuple[int, int]]:
        lineage, _ = self._read_lineage(head)
        homes = (
            (next((s.timeline for s in lineage if s.contains(slot)), None), slot) for slot in slots
        )
        return [(timeline, slot) for timeline, slot in homes if timeline is not None]

    def _read_lineage(self, head: LogHead) -> tuple[list[LineageSegment], list[ForkRecord]]:
        """Lineage and restores as of a head; both change only with its timeline."""
        if self._forks is None or self._forks[0] != head.timeline:
            forks = self.log.list_forks()[: head.timeline]
            self._forks = head.timeline, self.log.lineage(head.timeline), forks
        return self._forks[1:]

    def _load_epochs(self, places: list[tuple[int, int]]) -> list[_SeenEpoch | None]:
        """What was sealed at these places; reads what it has not seen yet, several at once."""
        missing = [place for place in places if place not in self._seen]
        if missing:
            with ThreadPoolExecutor(READ_WORKERS) as pool:
                self._seen |= dict(
                    zip(
                        missing,
                        pool.map(
                            lambda place: _summarize_epoch(self.log.read_slot(*place)), missing
                        ),
                        strict=True,
                    )
                )
        return [self._seen[place] for place in places]

    def _barrier_history(self, head: LogHead, recent: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The newest closed barriers, newest first.

        Daily ones lie far behind the epochs in the charts.
        """
        if self._searched != head.timeline:
            lineage = self._iterate_lineage(head)
            older = [row for row in islice(lineage, _BARRIER_LOOK_BACK) if row.barriers][
                :BARRIERS_SHOWN
            ]
            places = [(row.timeline, row.slot) for row in older]
            self._barriers = {
                p: s[0]["barriers"]
                for p, s in zip(places, self._load_epochs(places), strict=True)
                if s
            }
            self._searched = head.timeline
        self._barriers |= {
            (p["timeline"], p["slot"]): p["barriers"] for p in recent if p["barriers"]
        }
        newest = sorted(self._barriers, key=lambda place: place[1], reverse=True)[:BARRIERS_SHOWN]
        self._barriers = {place: self._barriers[place] for place in newest}
        return [barrier for place in newest for barrier in reversed(self._barriers[place])][
            :BARRIERS_SHOWN
        ]

    # Checkpoints

    def _iterate_lineage(self, head: LogHead) -> Iterator[SlotSummary]:
        """Epochs of the current lineage, newest first.

        From memory as far as the charts reach, then from the index.
        """
        recent = self._recent_points(head)
        for point in reversed(recent):
            seen = self._seen[point["timeline"], point["slot"]]
            if seen is not None:
                yield seen[1]
        oldest = max(1, head.slot - CHART_POINTS + 1)
        for stretch in reversed(self._read_lineage(head)[0]):
            if stretch.first < oldest:
                yield from (
                    row
                    for row in self._index.iterate_newest_first(stretch.timeline)
                    if stretch.contains(row.slot) and row.slot < oldest
                )

    def _iterate_abandoned(self, head: LogHead) -> Iterator[SlotSummary]:
        """Epochs that restores have left behind, newest first."""
        lineage = {stretch.timeline: stretch for stretch in self._read_lineage(head)[0]}
        for timeline in reversed(range(head.timeline)):
            stretch = lineage.get(timeline)
            for row in self._index.iterate_newest_first(timeline):
                if stretch is not None and stretch.contains(row.slot):
                    break
                if row.kind == "epoch":
                    yield row

    def _read_pins(self) -> tuple[dict[str, list[str]], dict[str, str]]:
        roots = RootsFile(self.store, self.pipeline).read()
        pins: dict[str, list[str]] = {}
        for name, pin in sorted(roots.pins.items()):
            pins.setdefault(pin.checkpoint, []).append(name)
        return pins, {
            name: f"{entry.reason}: {entry.detail}" for name, entry in roots.condemned.items()
        }

    def _build_checkpoint_row(
        self,
        row: SlotSummary,
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
            "healthy": (
                None if well is None or row.kind != "epoch" else well(CheckpointId.parse(name))
            ),
            "on_lineage": on_lineage,
            "restorable": row.kind == "epoch" and name not in condemned,
        }


def _is_past_cursor(row: SlotSummary, before: tuple[int, int], abandoned: bool) -> bool:
    return (row.timeline, row.slot) < before if abandoned else row.slot < before[1]


def _summarize_epoch(filled: SlotContents | None) -> _SeenEpoch | None:
    if filled is None or not isinstance(filled.record, Manifest):
        return None
    return (
        build_epoch_point(filled.record),
        SlotSummary.from_slot(filled),
        read_sketches(filled.record),
    )


def _add_findings(row: dict[str, Any]) -> dict[str, Any]:
    findings = diagnose_stream(row, time.time_ns() // 1_000_000)
    return {**row, "findings": findings, "tone": pick_worst_tone(row["state"], findings)}


def _describe_restore(fork: dict[str, Any]) -> dict[str, Any]:
    names = (
        "timeline",
        "slot",
        "new_timeline",
        "fork_slot",
        "who",
        "why",
        "recover_to",
        "request_id",
    )
    return {**{name: fork[name] for name in names}, "at": fork["at"] // 1000}


def _describe_frontier_holder(
    status: dict[str, Any], manifest: Manifest | None
) -> dict[str, Any] | None:
    found = status.get("holder") or (manifest.frontier_holder if manifest else None)
    if not isinstance(found, dict):
        return None
    return {
        "member": found.get("member"),
        "why": found.get("why"),
        "since": to_milliseconds(found.get("since")),
    }


def _ticks_to_seconds(ticks: dict[str, int] | None) -> dict[str, int]:
    return {name: value // 1_000_000 for name, value in (ticks or {}).items()}


def _describe_driver(lease: LeaseView | None) -> dict[str, Any] | None:
    if lease is None or lease.holder is None:
        return None
    return {"pid": lease.holder.pid, "host": lease.holder.host, "token": lease.token}


def _format_error(error: Any) -> str | None:
    return str(error.get("message")) if isinstance(error, dict) else str(error) if error else None
