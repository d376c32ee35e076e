"""The driver's current step, and its report about itself in ``status.json``.

Airflow, the command line and people read ``status.json``. No code reads positions or results from
it: those are in the log.

`FreshnessMeter` measures how long rows take from their arrival until they are sealed, and until
readers see them. An epoch counts with the oldest object that it read of a source, so the figures
are upper bounds for its other rows. The store's clock stamps arrivals, the driver's clock seals.
Topics are not measured.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Final

import structlog

from tidegate.checkpoints.driver_reports import DriverStatus, read_status, write_status
from tidegate.checkpoints.freshness import Wait, select_since_outage
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock, PeriodicThread
from tidegate.checkpoints.lease import LEASE_TTL, Lease, LeaseRenewer
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.store import Store
from tidegate.errors import TidegateError
from tidegate.jobs.eventtime.decision_types import Decision
from tidegate.json_types import JsonObject
from tidegate.time_units import format_instant

from .error_classification import log_background_failure
from .log_output import bind_log_context

# Seconds. Observers wait 6 s for a sign of life, so they notice a lost driver in less than 10 s.
HEARTBEAT_INTERVAL = 2.0

STEP_DEADLINES: Final[Mapping[str, float]] = {
    # Listing and footers; and tasks count the rows of texts, Avro and ORC, 30 MB of them a second.
    "plan": 3600.0,
    "survey": 7200.0,  # tasks read all rows of the epoch and write events, some epochs twice
    "decide": 60.0,
    "move": 3600.0,  # all rows of the epoch
    "seal": 60.0,  # twice the retry budget of a seal
    "wait": 120.0,
    "start": 300.0,  # a cold JVM on a busy machine
    "load": 3600.0,  # arrival logs: a GET for each 2,000 objects ever found
    "publish": 3600.0,
}
"""Seconds that a step may take. A driver that takes longer counts as stuck and loses its lease."""

_log = structlog.get_logger("tidegate.driver")


class DriverSteps(LeaseRenewer):
    """Announces and times the driver's steps, and renews the lease while a step is in time.

    Implements the engine's protocol `EpochSteps`. The name of the step goes to the status, its
    deadline to the renewal of the lease, and its duration to the manifest.

    Args:
        lease: the lease to renew.
        max_gap: the most that a time without the lease counts as worked, in ticks; at least the TTL
            of the lease counts.
        clock: for renewals and deadlines.

    Attributes:
        since: when the current step began, in ticks.
        limit: seconds that the current step may take. An observer that sees no step end must not
            treat the driver as stuck before that.
    """

    def __init__(self, lease: Lease, max_gap: int, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(lease, clock=clock)
        self._timings: dict[str, float] = {}
        self._max_gap = max(LEASE_TTL, max_gap / 1e6)
        self._worked_lock = threading.Lock()
        self._worked, self._worked_at = 0.0, clock.monotonic()
        self.since, self.limit = 0, 0.0
        self.enter("start")

    def enter(self, name: str) -> None:
        """Announce a step of `STEP_DEADLINES` without measuring it."""
        self.since, self.limit = self._clock.wall_ticks(), STEP_DEADLINES[name]
        self.announce_step(name, self.limit)

    @contextmanager
    def measure_step(self, name: str) -> Iterator[None]:
        """Announce and measure a step. After it, the driver counts as waiting."""
        self.enter(name)
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._timings[name] = self._timings.get(name, 0.0) + time.perf_counter() - begun
            self.enter("wait")

    def renew_once(self) -> None:
        """Renew the lease, and count the time since the last call as worked; never raises."""
        try:
            super().renew_once()
            self.read_worked_ticks()
        # A defect, for example of a client library. If it ended the thread, the lease would run out
        # under a driver that is well.
        except Exception as error:
            self.trouble = log_background_failure("lease_not_renewed", "renewing the lease", error)

    def read_worked_ticks(self) -> int:
        """Return for how many ticks the lease was held so far.

        This clock stops while it is not held.

        The lease is held only while this process runs, the store answers and no step is overdue, so
        the time with it is the time worked. The loop and the renewal thread both call this, so that
        a gap is noticed even if no epoch runs.
        """
        with self._worked_lock:
            now = self._clock.monotonic()
            if self.lease.remaining_seconds > 0:
                passed = now - self._worked_at
                # A renewal lasts for the TTL. A longer time without one is a gap.
                self._worked += passed if passed <= LEASE_TTL else min(passed, self._max_gap)
                self._worked_at = now
            return int(self._worked * 1e6)

    def begin_attempt(self, epoch: int, name: str) -> None:
        """Add the epoch and the attempt's id to all later log lines."""
        bind_log_context(epoch=epoch, attempt=name)

    def require_lease(self) -> int:
        """Return the lease's token after a check.

        Raises:
            FencedError: the lease is lost.
            TransientError: its time is over, and the store does not answer.
        """
        self.lease.ensure_held()
        return self.lease.token

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds per step since `begin_epoch`."""
        return dict(self._timings)

    def begin_epoch(self) -> None:
        """Forget the timings of the last epoch, except for its seal.

        A manifest cannot contain the time of its own seal. The next one reports it.
        """
        seal = self._timings.get("seal")
        self._timings = {} if seal is None else {"seal_before": seal}


class StatusReporter(PeriodicThread):
    """Writes ``status.json`` whenever the state changes, and every two seconds in between.

    Args:
        store: where the document is.
        steps: the current step, and the lease.
        facts: fields that do not change; ``pipeline`` is one of them.
        clock: for the times in the document.
        silent_after: ticks without a row after which a source is reported as silent; None: never.

    Attributes:
        state: the state that was set last.
    """

    def __init__(
        self,
        store: Store,
        steps: DriverSteps,
        facts: JsonObject,
        clock: Clock = SYSTEM_CLOCK,
        *,
        silent_after: int | None = None,
    ) -> None:
        super().__init__("tidegate-status", self.write, HEARTBEAT_INTERVAL)
        self._store, self._steps, self._clock = store, steps, clock
        self._silent_after = silent_after
        self._facts: JsonObject = {"started_at": clock.wall_ticks(), **facts}
        self._read_live_facts: Callable[[], JsonObject] = dict
        self._lock = threading.Lock()
        self.state = "starting"

    def start_reporting(self, read_live_facts: Callable[[], JsonObject]) -> None:
        """Begin to write; `read_live_facts` is called for each document."""
        self._read_live_facts = read_live_facts
        self.start()

    def set_state(
        self, state: str, *, error: TidegateError | None = None, why: str | None = None
    ) -> None:
        """Change the state, `error` and `why` (None clears them), and write them at once."""
        # At once, and not with the next heartbeat: observers are patient with a driver that waits.
        self.state = state
        with self._lock:
            self._facts["error"] = error.as_dict() if error else None
            self._facts["why"] = why
        self.write()

    def record_epoch(self, manifest: Manifest, seconds: float) -> None:
        """Put the figures of a sealed epoch into the next document."""
        with self._lock:
            self._facts |= {
                "checkpoint": str(manifest.id),
                "slot": manifest.slot,
                "timeline": manifest.timeline,
                "sealed_at": manifest.created_at,
                "counters": manifest.counters.model_dump(mode="json"),
                "epoch_seconds": round(seconds, 3),
                "timings": manifest.timings,
            }

    def record_decision(self, decision: Decision, held_back: Sequence[str]) -> None:
        """Put the frontiers of the last cut into the next document, sealed or not.

        Args:
            decision: of the cut.
            held_back: members that back-pressure has left unread.
        """
        with self._lock:
            self._facts |= {
                "frontier": decision.frontier_after,
                "frontier_text": format_instant(decision.frontier_after),
                "statuses": decision.statuses,
                "holder": decision.holder,
                "blocked": list(decision.blocked),
                "held_back": list(held_back),
                "members": read_member_frontiers(decision),
                "silent": find_silent_sources(decision, self._silent_after),
            }

    def snapshot(self) -> JsonObject:
        """Return the fields of the document as of now."""
        with self._lock:
            return {
                **self._facts,
                **self._collect_live_facts(),
                "state": self.state,
                "step_since": self._steps.since,
                "step_limit": self._steps.limit,
            }

    def _collect_live_facts(self) -> JsonObject:
        """Return the live facts; without them the rest is still written.

        If the document did not change, an observer would think that the driver is stuck.
        """
        try:
            return self._read_live_facts()
        except Exception as error:
            trouble = log_background_failure("facts_not_read", "reading the live facts", error)
            return {"trouble": trouble.as_dict()}

    def write(self) -> None:
        """Write the document now. A failure is only logged: no epoch depends on the document.

        A driver that fails after another one took over leaves the other's document as it is: it may
        be its last one.
        """
        lease, pipeline = self._steps.lease, self._facts["pipeline"]
        try:
            if self.state == "failed":
                there = read_status(self._store, pipeline)
                if there is not None and there.token > lease.token:
                    return
            status = DriverStatus(
                token=lease.token,
                driver=lease.holder.driver,
                step=self._steps.step_name,
                at=self._clock.wall_ticks(),
                body={**self.snapshot(), "holder_process": lease.holder.model_dump()},
            )
            write_status(self._store, pipeline, status)
        except Exception as error:
            log_background_failure("status_not_written", "writing the status", error)


def find_silent_sources(decision: Decision, after: int | None) -> dict[str, int]:
    """Return the sources without a row for at least `after` ticks, and for how many ticks.

    Ages are on the pipeline clock. Sources that are done are left out.
    """
    inputs = decision.after.get("output", {}).get("inputs", {})
    ages = {name: decision.now - at for name, at in decision.after.get("active_at", {}).items()}
    return {
        name: age
        for name, age in ages.items()
        if after is not None and age >= after and inputs.get(name, {}).get("status") != "done"
    }


def read_member_frontiers(decision: Decision) -> dict[str, int | None]:
    """Return each member's frontier from the decider's state, in ticks; None before its first."""
    sources = decision.after.get("sources", {})
    return {
        name: member["frontier"]
        for source in sources.values()
        for name, member in source["inputs"].items()
    }


_EPOCHS_KEPT = 1_000
_PERCENTILES = (50, 95, 99)
_P95 = _PERCENTILES.index(95)


@dataclass
class _Journey:
    """Rows of one source in one epoch; times in ticks.

    Attributes:
        after_outage: nothing was sealed, or nothing became visible, for longer than the goal just
            before.
        visible_at: when every sink had the epoch; None until then.
    """

    source: str
    slot: int
    arrived_at: int
    sealed_at: int
    after_outage: bool = False
    visible_at: int | None = None


class FreshnessMeter:
    """Measures the epochs of this driver, the newest 1,000 of all sources together.

    `visible` is as exact as the readings are frequent: the status reads every two seconds.

    Args:
        goal: ticks from arrival to visible that 95 of 100 epochs should keep; None or 0: no goal.
        count_unpublished: returns how many sealed epochs a sink does not show yet.
        clock: tells when an epoch is seen to be visible.
    """

    def __init__(
        self, goal: int | None, count_unpublished: Callable[[], int], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._goal, self._count_unpublished, self._clock = goal, count_unpublished, clock
        self._journeys: deque[_Journey] = deque(maxlen=_EPOCHS_KEPT)
        self._newest_slot = 0
        self._sealed_at: int | None = None  # the newest seal
        self._progress_at: int | None = None  # when an epoch became visible, or none was missing
        self._published = 0
        self._lock = threading.Lock()

    def note_sealed(self, manifest: Manifest) -> None:
        """Count an epoch that was sealed just now."""
        with self._lock:
            self._newest_slot = manifest.slot
            paused = self._has_paused(self._sealed_at, manifest.created_at)
            self._sealed_at = manifest.created_at
            self._journeys.extend(
                _Journey(source, manifest.slot, arrived, manifest.created_at, paused)
                for source, arrived in manifest.find_oldest_arrivals().items()
            )

    def read_facts(self) -> JsonObject:
        """Return the fields of the status, and note which epochs have become visible.

        `freshness` has per source a list of seconds at the percentiles 50, 95 and 99 until `sealed`
        and until `visible`. `stale` names sources beyond the goal, with the seconds of their 95th
        percentile until `visible`, over the rows that arrived since the last outage or backlog was
        caught up with.
        """
        with self._lock:
            published, now = self._newest_slot - self._count_unpublished(), self._clock.wall_ticks()
            has_moved = published > self._published
            paused = has_moved and self._has_paused(self._progress_at, now)
            if has_moved or published == self._newest_slot:
                self._progress_at = now
            self._published = published
            waits: dict[str, dict[str, list[int]]] = {}
            for one in self._journeys:
                if one.visible_at is None and one.slot <= published:
                    one.visible_at = now
                    one.after_outage = one.after_outage or paused
                found = waits.setdefault(one.source, {"sealed": [], "visible": []})
                found["sealed"].append(one.sealed_at - one.arrived_at)
                # What readers do not see yet is at least as old as it is now.
                found["visible"].append((one.visible_at or now) - one.arrived_at)
        freshness = {
            source: {stage: _compute_percentiles(ticks) for stage, ticks in stages.items()}
            for source, stages in sorted(waits.items())
        }
        return {"freshness": freshness, "stale": self._find_stale(now)}

    def _has_paused(self, before: int | None, now: int) -> bool:
        """A driver's first epochs count as the end of a pause: objects waited for its start."""
        return before is None or (self._goal is not None and now - before > self._goal)

    def _find_stale(self, now: int) -> dict[str, float]:
        """Sources beyond the goal, by the rows that arrived since the last outage or backlog."""
        if not self._goal:
            return {}
        waits: dict[str, list[Wait]] = {}
        with self._lock:
            for one in self._journeys:
                is_over = one.visible_at is not None
                wait = Wait(one.arrived_at, one.visible_at or now, one.after_outage, is_over)
                waits.setdefault(one.source, []).append(wait)
        stale = {}
        for source, own in sorted(waits.items()):
            judged = [wait.done - wait.arrived for wait in select_since_outage(own, self._goal)]
            p95 = _compute_percentiles(judged)[_P95]
            if p95 * 1e6 > self._goal:
                stale[source] = p95
        return stale


def _compute_percentiles(ticks: list[int]) -> list[float]:
    """Seconds at each of `_PERCENTILES`, by the nearest rank."""
    ordered = sorted(ticks)
    ranks = (ceil(len(ordered) * percent / 100) - 1 for percent in _PERCENTILES)
    # The clocks of store and driver may differ, so a short wait can come out negative.
    return [round(max(0, ordered[rank]) / 1e6, 3) for rank in ranks]
