"""What the page shows of one stream: plain data, times in milliseconds since 1970."""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from typing import Any, TypeVar

from tidegate.checkpoints.bucket_layout import BucketLayout, CheckpointId
from tidegate.checkpoints.checkpoint_catalog import (
    CheckpointCatalog,
    build_illness_finder,
    diff_checkpoints,
    make_annotator,
)
from tidegate.checkpoints.checkpoint_specs import read_spec
from tidegate.checkpoints.deployed_specs import (
    describe_deploy_change,
    list_changes,
    list_deploy_warnings,
    read_deployed,
)
from tidegate.checkpoints.driver_reports import (
    count_waiting_messages,
    count_waiting_objects,
    list_log_attempts,
    read_log_tail,
)
from tidegate.checkpoints.driver_requests import list_pending_requests
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.illness_record import is_verdict_stale
from tidegate.checkpoints.lease import LeaseObserver
from tidegate.checkpoints.manifest import ForkRecord, Manifest
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.pipeline_overview import PipelineState, read_driver, read_overview
from tidegate.checkpoints.restore import plan_restore, read_restore_audits
from tidegate.checkpoints.shared_documents import read_json_object
from tidegate.checkpoints.slot_index import SlotSummary
from tidegate.checkpoints.slot_log import LineageSegment, LogHead, SlotContents, SlotLog
from tidegate.checkpoints.splice_requests import OPEN_STATES, list_splice_requests
from tidegate.checkpoints.store import Store, map_in_threads
from tidegate.checkpoints.verify import verify_checkpoint
from tidegate.errors import ConfigurationError, PoisonError, TidegateError, TransientError
from tidegate.jobs.spec.job_spec import SupervisedSpec
from tidegate.jobs.spec.spec_differences import list_differences
from tidegate.json_types import JsonObject

from .errors import PAGE_BUSY
from .page_data import (
    LatenessSketches,
    build_epoch_point,
    build_graph,
    build_lateness_charts,
    describe_checkpoint_epoch,
    describe_frontier_holder,
    describe_queries,
    describe_restore,
    diagnose_stream,
    explain_state,
    find_transition,
    list_deploy_events,
    list_driver_events,
    list_lease_events,
    list_merge_events,
    list_open_barriers,
    list_verdict_events,
    pick_worst_tone,
    read_instant,
    to_milliseconds,
)

# Epochs in the charts: more than pixels need, few enough to be read in a moment.
CHART_POINTS = 120
CHECKPOINTS_PER_PAGE = 25
READ_WORKERS = 8
BARRIERS_SHOWN = 60
_LOCK_PATIENCE = 1.0  # seconds; a look at the bucket usually takes a tenth of that
_QUALITY_FRESH_SECONDS = 15.0  # a verdict is minutes old when it is new
_DEPLOYS_FRESH_SECONDS = 60.0  # to parse the file of a spec takes a tenth of a second
_EPOCHS_REMEMBERED = 600  # those of the charts, and some that were searched
# Epochs searched for barriers when the page is first asked for: four pages of the index.
_BARRIER_LOOK_BACK = 2_000
# Milliseconds between the clocks of two hosts that have driven one stream, at most.
_CLOCK_DIFFERENCE = 60_000

_CHECK_FIELDS = (
    *("id", "says", "severity", "passed", "observed", "page"),
    *("owner", "value", "limit", "is_least", "sample", "command"),
)

_SHOWN_OF_DRIVER = ("freshness", "stale", "sinks", "late_uploads")
_SHOWN_OF_CHECKPOINT = {
    *("id", "kind", "timeline", "slot", "pins", "condemned", "on_lineage"),
    *("read", "late", "bytes", "files", "gap"),
}

T = TypeVar("T")
SpecFile = tuple[SupervisedSpec, dict[str, str]]
"""The spec in a file, and its code."""
_Position = tuple[int, int]  # timeline and slot
_SeenEpoch = tuple[JsonObject, LatenessSketches]


def build_unknown_row(pipeline: str, error: TidegateError, **dag: Any) -> JsonObject:
    """Return the row of a stream whose store does not answer or is not configured."""
    away = isinstance(error, TransientError)
    state = PipelineState.UNKNOWN.word_for("page")
    return _add_findings(
        {"pipeline": pipeline, "state": state, "why": error.message, "away": away, **dag}
    )


class StreamView:
    """Reads one stream.

    Remembers what cannot change, so that a refresh costs a handful of small GETs. Safe to use from
    several threads; requests within `fresh` seconds share one look at the bucket.
    """

    def __init__(
        self,
        store: Store,
        pipeline: str,
        *,
        fresh: float = 1.5,
        clock: Clock = SYSTEM_CLOCK,
        find_file: Callable[[], SpecFile | None] = lambda: None,
    ) -> None:
        self.store, self.pipeline = store, pipeline
        self._find_file = find_file
        self._watch = LeaseObserver(store, pipeline, clock)
        self._fresh, self._clock = fresh, clock
        self._shared: dict[str, tuple[float, Any]] = {}
        self._lock = threading.RLock()
        self._uid: str | None = None  # of the pipeline whose epochs are remembered
        self._forget_epochs()

    def _forget_epochs(self) -> None:
        self.log = SlotLog(self.store, self.pipeline)
        self._catalog = CheckpointCatalog(self.log, workers=READ_WORKERS)
        self._seen: dict[_Position, _SeenEpoch | None] = {}
        self._barriers: dict[int, list[JsonObject]] = {}  # by slot of the lineage
        # By digest; that of the newest epoch is kept.
        self._read_spec = lru_cache(1)(partial(read_spec, self.store, self.pipeline))
        # What two digests or two deploys differ in never changes.
        self._describe_spec_change = lru_cache(64)(
            partial(_describe_spec_change, self.store, self.pipeline)
        )
        self._describe_deploy = lru_cache(64)(
            partial(describe_deploy_change, self.store, self.pipeline)
        )
        self._searched: int | None = None  # the timeline whose past was searched for barriers
        # By timeline: lineage and restores change only with it.
        self._read_lineage = lru_cache(1)(partial(_load_lineage, self.log))
        self._verified: dict[str, JsonObject] = {}

    def _read_head(self) -> LogHead:
        """The head of the log. What is remembered of a log that a wipe has replaced is dropped."""
        head = self.log.head()
        uid = head.record.uid if head.record else self._uid
        if self._uid not in (None, uid):
            self._forget_epochs()
            head = self.log.head()
        self._uid = uid
        return head

    def summary(self, **dag: Any) -> JsonObject:
        """Return the stream's row of the list.

        Args:
            dag: what Airflow knows of its DAG (`AirflowQueries.find_stream`), added to the row.

        Raises:
            TidegateError: the store does not answer (see `build_unknown_row`), or another request
                reads the stream for the first time.
        """
        try:
            with self._hold_lock():
                row = self._read_shared("summary", lambda: self._read_summary(self._read_head()))
        except TransientError as error:
            if error.code != PAGE_BUSY.code or "summary" not in self._shared:
                raise
            row = self._shared["summary"][1]
        return _add_findings({**row, **dag})

    def detail(
        self, since: _Position | None = None, span: int = CHART_POINTS, **dag: Any
    ) -> JsonObject:
        """Return everything about the stream except older checkpoints.

        Args:
            since: timeline and slot of the newest point that the caller has; only newer points are
                sent if the timeline is still the current one and `span` is the default. `partial`
                in the answer says so.
            span: how many epochs back the charts reach, 0 for all; at most `CHART_POINTS` of them
                are drawn.
            dag: as for `summary`.
        """
        with self._hold_lock():
            head = self._read_head()
            detail = self._read_shared("detail", lambda: self._read_detail(head))
            recent = span == CHART_POINTS
            epochs = self._recent_epochs(head) if recent else self._sample_epochs(head, span)
            known = recent and since and since[0] == head.timeline and since[1] <= head.slot
            first = since[1] + 1 if since and known else 0
            points = [point for point, _ in epochs if point["slot"] >= first]
            return _add_findings({**detail, **dag, "points": points, "partial": bool(known)})

    def checkpoint_page(
        self,
        before: _Position | None = None,
        *,
        limit: int = CHECKPOINTS_PER_PAGE,
        abandoned: bool = False,
        until: int | None = None,
        restorable: bool = False,
    ) -> JsonObject:
        """Return a page of the checkpoint table, newest first.

        Args:
            before: the last row of the previous page, as its `next` said.
            limit: rows of a page.
            abandoned: those that restores have left behind, instead of the current lineage.
            until: only those sealed at or before this time, in milliseconds since 1970.
            restorable: only those that can be restored.
        """
        with self._hold_lock():
            head, roots = self._read_head(), RootsFile(self.store, self.pipeline).read()
            if abandoned:
                source = self._iterate_abandoned(head)
            else:
                last = head.slot if until is None else self._find_newest_slot(head, until)
                source = self._catalog.iterate_newest_first(
                    self._read_lineage(head.timeline)[0], last
                )
            rest = (
                row
                for row in map(make_annotator(roots, self._read_lineage(head.timeline)[0]), source)
                if (before is None or _is_past_cursor(row, before, abandoned))
                and (until is None or row.created_at <= until * 1000)
                and (row.is_restorable or not restorable)
            )
            rows = list(islice(rest, limit + 1))  # one more, to know whether there is a next page
            if abandoned:
                rows = self._catalog.mark_gaps(rows)
            quality = self._read_quality()
            find_illness = build_illness_finder(self.store, self.pipeline) if quality else None
            epochs = self._read_page_epochs(rows)
        shown = [
            {
                **row.model_dump(include=_SHOWN_OF_CHECKPOINT),
                "at": row.created_at // 1000,
                "restorable": row.is_restorable,
                "verified": (
                    {"verdict": "damaged"} if row.condemned else self._verified.get(row.id or "")
                ),
                "healthy": (
                    find_illness(CheckpointId.parse(row.id or "")) is None
                    if find_illness and row.kind == "epoch"
                    else None
                ),
                **describe_checkpoint_epoch(epochs, nth, self._describe_spec_change),
            }
            for nth, row in enumerate(rows[:limit])
        ]
        more = [rows[limit - 1].timeline, rows[limit - 1].slot] if len(rows) > limit else None
        return {"rows": shown, "next": more, "newest": head.slot}

    def _read_page_epochs(self, rows: list[SlotSummary]) -> list[JsonObject | None]:
        """The epochs of rows, in their order; None for one that is retired or no epoch."""
        seen = self._seen
        missing = [
            (row.timeline, row.slot)
            for row in rows
            if row.kind == "epoch" and (row.timeline, row.slot) not in seen
        ]
        read = map_in_threads(self._read_epoch, missing, READ_WORKERS)
        known = seen | dict(zip(missing, read, strict=True))
        found = [known.get((row.timeline, row.slot)) for row in rows]
        return [epoch[0] if epoch else None for epoch in found]

    def _read_epoch(self, place: tuple[int, int]) -> Any:
        """The summary of an epoch; None for one that is retired or damaged."""
        try:
            return _summarize_epoch(self.log.read_slot(*place))
        except (ConfigurationError, PoisonError):
            return None  # of the others a person has to choose one to go back to

    def restore_impact(self, checkpoint: str) -> JsonObject:
        """Return what a restore to this checkpoint would take back, as the fields of `RestorePlan`.

        `since` is in milliseconds. It does not refuse a condemned checkpoint.

        Args:
            checkpoint: as a person names it (`CheckpointCatalog.resolve`).

        Raises:
            ConfigurationError: no checkpoint fits, or several do, or an epoch that the restore
                would apply again was retired.
            PoisonError: the checkpoint was retired.
        """
        plan = plan_restore(self.log, self._catalog.resolve(checkpoint))
        return {**plan.model_dump(), "since": to_milliseconds(plan.since)}

    def diff(self, left: str, right: str) -> JsonObject:
        """Return what differs between two checkpoints; names and pins are resolved."""
        catalog = self._catalog
        manifests = (catalog.read_manifest(catalog.resolve(name)) for name in (left, right))
        return diff_checkpoints(*manifests).model_dump()

    def verify(self, checkpoint: str) -> JsonObject:
        """Check that everything a checkpoint needs is there in the right size.

        `checkpoint` is an id. The restore itself also compares checksums.
        """
        target = CheckpointId.parse(checkpoint)
        # Nothing is condemned here: a reader of the page has no right to write.
        result = verify_checkpoint(self.log, target, checksums=False).model_dump(mode="json")
        at = time.time_ns() // 1_000_000
        self._verified[checkpoint] = {"verdict": result["verdict"], "at": at}
        return result

    def read_newest_log(self) -> JsonObject:
        """Return the last lines, at most 200, that the newest driver has sent to the bucket."""
        newest = next(iter(list_log_attempts(self.store, self.pipeline)), None)
        lines = read_log_tail(self.store, self.pipeline, newest) if newest else []
        return {"attempt": newest, "lines": lines}

    def read_timeline(self) -> list[JsonObject]:
        """Return the events of the timeline, in no order."""
        with self._hold_lock():
            head = self.log.head()
            newest = self._read_point(head, head.slot)
            driver = read_driver(self.store, self.pipeline, self._watch)
        return [
            *list_lease_events(driver, newest),
            *list_driver_events(
                newest, lambda slot: self._read_point(head, slot), self._describe_spec_change
            ),
            *list_deploy_events(
                read_deployed(self.store, self.pipeline),
                self._describe_deploy,
            ),
            *list_merge_events(list_splice_requests(self.store, self.pipeline)),
            *list_verdict_events(self._read_quality_file("history.json").get("runs", [])),
        ]

    def read_checks(self) -> JsonObject:
        """Return the checks of the newest quality run, failed ones first, and all known runs.

        A run names the checks that failed and the value that each check judged.
        """
        result = self._read_quality_file("results/latest.json")
        runs = self._read_quality_file("history.json").get("runs", [])
        shown = ("id", "at", "verdict", "failed", "values")
        return {
            "at": result.get("at"),
            "checks": [
                {name: check.get(name) for name in _CHECK_FIELDS} | {"run": result.get("id")}
                for check in sorted(
                    result.get("checks", []), key=lambda c: (c["passed"], c["severity"])
                )
            ],
            "runs": [{name: run.get(name) for name in shown} for run in runs],
        }

    def _read_quality_file(self, name: str) -> JsonObject:
        """A document of the quality runs; empty before the first, and if it is damaged."""
        return read_json_object(self.store, f"{BucketLayout(self.pipeline).quality_prefix}{name}")

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Let one request read; the others wait only briefly, because each holds a thread."""
        if not self._lock.acquire(timeout=_LOCK_PATIENCE):
            raise PAGE_BUSY(what=f"{self.pipeline} is being read", pipeline=self.pipeline)
        try:
            yield
        finally:
            self._lock.release()

    # What does not change from one second to the next is read once for all requests.

    def _read_shared(self, name: str, read: Callable[[], T], fresh: float | None = None) -> T:
        cached = self._shared.get(name)
        now = self._clock.monotonic()
        if cached is not None and now - cached[0] < (self._fresh if fresh is None else fresh):
            value: T = cached[1]
            return value
        try:
            value = read()
        except TransientError:
            # The drivers could not renew their leases either: silence is timed from the store's
            # return on.
            self._watch = LeaseObserver(self.store, self.pipeline, self._clock)
            raise
        self._shared[name] = (now, value)
        return value

    def _read_summary(self, head: LogHead) -> JsonObject:
        overview = read_overview(self.log, self._watch, head)
        driver, desired, newest = overview.driver, overview.desired, overview.newest
        alive = not driver.lease_expired
        lease = driver.lease if alive else None
        live_facts = driver.facts if alive else {}
        holder = lease.holder if lease else None
        return {
            "pipeline": self.pipeline,
            "state": overview.state.word_for("page"),
            "why": explain_state(overview),
            "desired": {
                "state": desired.state.value,
                "who": desired.who,
                "why": desired.why,
                "at": desired.at // 1000,
            },
            "driver": (
                {"pid": holder.pid, "host": holder.host, "token": lease.token}
                if lease and holder
                else None
            ),
            "reported_at": driver.last_report.at // 1000 if driver.last_report else None,
            "step": driver.last_report.step if alive and driver.last_report else None,
            "trouble": _format_error(live_facts.get("trouble")),
            "silent": {
                name: ticks // 1_000_000 for name, ticks in (live_facts.get("silent") or {}).items()
            },
            "lag": count_waiting_messages(live_facts),
            "backlog": count_waiting_objects(live_facts),
            **{name: live_facts.get(name) or {} for name in _SHOWN_OF_DRIVER},
            "warnings": [*overview.warnings, *self._read_deploy_warnings()],
            "holder": describe_frontier_holder(driver, newest),
            **{name: driver.facts.get(name) for name in ("unpublished", "error", "spark_ui")},
            "queries": describe_queries(newest),
            "commit": self._read_commit(),
            "checkpoint": str(newest.id) if newest else None,
            "timeline": head.timeline,
            "slot": head.slot,
            "sealed_at": newest.created_at // 1000 if newest else None,
            "latest": build_epoch_point(newest) if newest else None,
            "quality": self._describe_quality(newest),
        }

    def _read_commit(self) -> str | None:
        """The commit of git of what drivers run, if it is known."""

        def read_commit() -> str | None:
            """From the deployed copy; a damaged document is among the warnings."""
            try:
                current = read_deployed(self.store, self.pipeline).current
            except PoisonError:
                return None
            return current.commit if current else None

        return self._read_shared("commit", read_commit, _DEPLOYS_FRESH_SECONDS)

    def _read_deploy_warnings(self) -> list[str]:
        """Deploys that wait or failed, and in what the file differs from what is deployed."""

        def list_warnings() -> list[str]:
            """Read file and copy; a damaged document is a warning of its own."""
            file, code = self._find_file() or (None, {})
            try:
                return list_deploy_warnings(self.store, self.pipeline, file, code)
            except PoisonError as error:
                return [error.message]

        return self._read_shared("deploys", list_warnings, _DEPLOYS_FRESH_SECONDS)

    def _read_detail(self, head: LogHead) -> JsonObject:
        recent = self._recent_epochs(head)
        roots = RootsFile(self.store, self.pipeline).read()
        forks = reversed(self._read_lineage(head.timeline)[1])
        requests = list_pending_requests(self.store, self.pipeline)
        audits = read_restore_audits(self.store, self.pipeline)
        summary = self._read_shared("summary", lambda: self._read_summary(head))
        return {
            **summary,
            "lateness": build_lateness_charts(sketches for _, sketches in recent),
            "barriers": self._barrier_history(head, recent),
            "graph": self._read_graph(head, summary),
            "open_barriers": self._read_open_barriers(head.record) if head.record else [],
            "requests": [request.model_dump(mode="json") for request in requests],
            "restores": [describe_restore(fork) for fork in forks],
            "trail": [audit.model_dump(mode="json") for audit in audits],
            "pins": [
                {"name": name, **pin.model_dump(), "at": pin.at // 1000}
                for name, pin in sorted(roots.pins.items())
            ],
        }

    def _read_open_barriers(self, newest: Manifest) -> list[JsonObject]:
        if not (newest.decider.get("barriers") or {}).get("open"):
            return []
        spec = self._read_spec(newest.spec_digest)
        return list_open_barriers(newest, spec.barrier_timeout if spec else None)

    def _read_graph(self, head: LogHead, summary: JsonObject) -> JsonObject | None:
        spec = self._read_spec(head.record.spec_digest) if head.record else None
        if spec is None:
            return None
        requests = self._read_shared(
            "merges",
            lambda: list_splice_requests(self.store, self.pipeline),
            _QUALITY_FRESH_SECONDS,
        )
        return build_graph(spec, summary, sum(one.state in OPEN_STATES for one in requests))

    def _describe_quality(self, newest: Manifest | None) -> JsonObject | None:
        """The newest verdict, and whether epochs were sealed long after it."""
        found = self._read_shared("quality", self._read_quality, _QUALITY_FRESH_SECONDS)
        if found is None:
            return None
        checked_at, sealed_at = read_instant(found["at"]), newest.created_at if newest else 0
        is_stale = checked_at is None or is_verdict_stale(
            checked_at / 1000, sealed_at / 1e6, found["every"]
        )
        return {**found, "stale": is_stale}

    def _read_quality(self) -> JsonObject | None:
        result = self._read_quality_file("results/latest.json")
        if not result:
            return None
        docs = str(result.get("docs") or "").partition("/quality/docs/")[2]
        names = ("at", "verdict", "checkpoint", "failed", "every")
        return {**{name: result.get(name) for name in names}, "docs": docs or "index.html"}

    # Epochs

    def _recent_epochs(self, head: LogHead) -> list[_SeenEpoch]:
        """The newest epochs of the lineage, oldest first."""
        return self._load_epochs(head, range(head.slot - CHART_POINTS + 1, head.slot + 1))

    def _sample_epochs(self, head: LogHead, span: int) -> list[_SeenEpoch]:
        """At most `CHART_POINTS` of the last `span` epochs, evenly spread, with the newest."""
        reach = min(span or head.slot, head.slot)
        step = max(1, -(-reach // CHART_POINTS))
        return self._load_epochs(head, [*range(head.slot, head.slot - reach, -step)][::-1])

    def _read_point(self, head: LogHead, slot: int) -> JsonObject | None:
        """An epoch of the lineage; None if it is retired."""
        return next((epoch[0] for epoch in self._load_epochs(head, [slot])), None)

    def _find_newest_slot(self, head: LogHead, until: int) -> int:
        """The newest slot that may have been sealed until a time, in milliseconds since 1970.

        Times grow along a lineage, except where the clocks of two hosts differ. A retired epoch
        counts as sealed before, so that no later one is missed.
        """

        def read_time(slot: int) -> int:
            """When the epoch was sealed, in milliseconds since 1970."""
            point = self._read_point(head, slot)
            return point["at"] if point else 0

        # Each clock may be wrong by half of the difference in either direction.
        return bisect_right(range(1, head.slot + 1), until + _CLOCK_DIFFERENCE, key=read_time)

    def _load_epochs(self, head: LogHead, slots: Iterable[int]) -> list[_SeenEpoch]:
        """The epochs of these slots that are not retired; reads those not seen, several at once."""
        segments, seen = self._read_lineage(head.timeline)[0], self._seen
        positions = [(s.timeline, slot) for slot in slots for s in segments if s.contains(slot)]
        missing = [position for position in positions if position not in seen]
        epochs = map_in_threads(
            lambda position: _summarize_epoch(self.log.read_slot(*position)), missing, READ_WORKERS
        )
        seen |= zip(missing, epochs, strict=True)
        asked = [epoch for position in positions if (epoch := seen[position]) is not None]
        for position in [*seen][: max(0, len(seen) - _EPOCHS_REMEMBERED)]:
            del seen[position]
        return asked

    def _barrier_history(self, head: LogHead, recent: list[_SeenEpoch]) -> list[JsonObject]:
        """The newest closed barriers, newest first.

        Daily ones lie far before the epochs in the charts, so the index is searched once per
        timeline.
        """
        if self._searched != head.timeline:
            # From the index: an epoch that the charts remember may have been retired since.
            whole = self._catalog.iterate_newest_first(
                self._read_lineage(head.timeline)[0], head.slot
            )
            lineage = islice(whole, _BARRIER_LOOK_BACK)
            rows = islice((row for row in lineage if row.barriers), BARRIERS_SHOWN)
            recent = self._load_epochs(head, [row.slot for row in rows]) + recent
            self._searched, self._barriers = head.timeline, {}
        found = {point["slot"]: point["barriers"] for point, _ in recent if point["barriers"]}
        newest = sorted((self._barriers | found).items(), reverse=True)
        self._barriers = dict(newest[:BARRIERS_SHOWN])
        shown = [barrier for group in self._barriers.values() for barrier in reversed(group)]
        return shown[:BARRIERS_SHOWN]

    # Checkpoints

    def _iterate_abandoned(self, head: LogHead) -> Iterator[SlotSummary]:
        """Epochs that restores have left behind, newest first."""
        lineage = {segment.timeline: segment for segment in self._read_lineage(head.timeline)[0]}
        for timeline in reversed(range(head.timeline)):
            segment = lineage.get(timeline)
            for row in self._catalog.index.iterate_newest_first(timeline):
                if segment is not None and segment.contains(row.slot):
                    break
                if row.kind == "epoch":
                    yield row


def _load_lineage(log: SlotLog, timeline: int) -> tuple[list[LineageSegment], list[ForkRecord]]:
    return log.lineage(timeline), log.list_forks()[:timeline]


def _is_past_cursor(row: SlotSummary, before: _Position, abandoned: bool) -> bool:
    return (row.timeline, row.slot) < before if abandoned else row.slot < before[1]


def _describe_spec_change(store: Store, pipeline: str, before: str, after: str) -> str:
    """In what a spec differs from an earlier one; their digests if one cannot be read."""
    old, new = (read_spec(store, pipeline, digest) for digest in (before, after))
    # They may differ in a secret, which is masked, or in a default of a newer version.
    changes = list_changes(list_differences(old, new, {}, {})) if old and new else ""
    return changes or f"from {before[:8]} to {after[:8]}"


def _summarize_epoch(slot: SlotContents | None) -> _SeenEpoch | None:
    if slot is None or not isinstance(slot.record, Manifest):
        return None
    return build_epoch_point(slot.record), slot.record.epoch_notes.sketches


def _add_findings(row: JsonObject) -> JsonObject:
    now = time.time_ns() // 1_000_000
    row = {**row, **find_transition(row, now)}
    findings = diagnose_stream(row, now)
    return {**row, "findings": findings, "tone": pick_worst_tone(row["state"], findings)}


def _format_error(error: Any) -> str | None:
    return str(error.get("message")) if isinstance(error, dict) else str(error) if error else None
