"""Judges whether a stream is alive, from one look at its lease, report and launched process.

        running   a driver renews the lease and finishes steps, or the launched driver is starting
        stalled   a driver holds the lease but finished no step for `stall_after` and for the time
            that it allows the step, or the launched driver did not take the lease
        lost      the driver is gone without a final report
        finished, stopped, failed
                  the driver reported it, or its exit code says so

No rule compares the clocks of two hosts: the observer times silence and standstill on its own. The
time in which the store did not answer counts neither for nor against a driver.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tidegate.checkpoints.driver_reports import DriverStatus, read_log_tail
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.lease import LeaseObserver, LeaseView
from tidegate.checkpoints.pipeline_overview import (
    FINAL_STATES,
    DriverOverview,
    PipelineState,
    parse_reported_state,
    read_driver,
)
from tidegate.checkpoints.store import Store
from tidegate.errors import TidegateError, TransientError
from tidegate.json_types import JsonObject, JsonView

from .child_processes import classify_exit_code
from .driver_launch import LaunchedDriver, is_on_this_host

# Seconds for which a store may refuse, or a document be unreadable, before that is a failure. It
# usually takes less time to renew a key or to set a clock right.
UNREADABLE_PATIENCE = 300.0

LOG_SEND_SECONDS = 10.0  # how often a driver sends its log to the bucket


@dataclass(frozen=True)
class LivenessLimits:
    """How patient an observer is, in seconds. Deferred triggers carry these fields.

    Attributes:
        start_timeout: from launch to the lease: a JVM with a cold jar cache on a busy machine may
            need a minute.
        stall_after: no finished step for this long, if the driver allows its step less.
        lease_margin: added to the TTL, for the time between a renewal and the observer's look.
    """

    start_timeout: float = 180.0
    stall_after: float = 120.0
    lease_margin: float = 1.0


@dataclass(frozen=True)
class LivenessSample:
    """What an observer saw in one look.

    Attributes:
        driver: lease and newest report.
        silent_for: seconds that the lease's ETag has not changed, on the observer's clock.
        floor: reports with a lower token come from drivers before the watched one.
        still_for: seconds without progress, on the observer's clock.
        process_alive: the process that this task launched may still run.
        exit_code: that process ended with this code.
        log_error: that process ended with this error, as its log in the bucket says; for a process
            on another host, whose exit code is not to be seen here.
        launched_for: seconds since the observer began, which was right after the launch.

    `still_for` and `launched_for` leave out the time in which the store did not answer.
    """

    driver: DriverOverview
    silent_for: float
    floor: int
    still_for: float = 0.0
    process_alive: bool = False
    exit_code: int | None = None
    log_error: JsonView | None = None
    launched_for: float = 0.0


@dataclass(frozen=True)
class Observation:
    """The conclusion, JSON-ready: it travels from the trigger to the task.

    Attributes:
        state: RUNNING, STALLED, LOST, FINISHED, STOPPED or FAILED; only RUNNING needs no action.
        why: one sentence for the task log.
        token: of the lease at that time; 0 without a lease.
        error: as the driver reported it (`TidegateError.as_dict`), for FAILED.
        standby_missing: a driver runs, and the standby that should wait does not run.
        evidence: what the look saw of the driver; a later look that sees something else has seen
            it alive. Empty in events of older triggers.
        floor: of the observer at that time; 0 in events of older triggers.
    """

    state: PipelineState
    why: str
    token: int = 0
    error: JsonObject = field(default_factory=dict)
    standby_missing: bool = False
    evidence: list[Any] = field(default_factory=list)
    floor: int = 0

    def as_dict(self) -> JsonObject:
        """Return the payload of the trigger's event."""
        return {**asdict(self), "state": self.state.word_for("event")}

    @classmethod
    def from_dict(cls, data: JsonView) -> Observation:
        """Read the form of `as_dict`."""
        live = data["state"] == PipelineState.RUNNING.word_for("event")
        state = PipelineState.RUNNING if live else PipelineState(data["state"])
        # Events of a trigger that was made by an older version say nothing about a standby.
        missing, evidence = bool(data.get("standby_missing")), list(data.get("evidence") or ())
        token, error, floor = int(data["token"]), dict(data["error"]), int(data.get("floor") or 0)
        return cls(state, str(data["why"]), token, error, missing, evidence, floor)

    def is_refuted_by(self, driver: DriverOverview) -> bool:
        """Whether a later look shows that the driver lives, or that another one drives by now."""
        lease = driver.lease
        if self.state not in (PipelineState.STALLED, PipelineState.LOST):
            return False
        if lease is None or lease.is_free:
            return False
        if lease.token > self.token:
            return True
        # A driver that hangs may renew its lease, and one that is lost may have reported before.
        shown = {"lease": lease.etag, "progress": find_progress(driver)}
        return bool(self.evidence) and shown[self.evidence[0]] != self.evidence[1]


def find_progress(driver: DriverOverview) -> list[Any] | None:
    """Return what changes whenever the driver finishes a step; None without a report."""
    report = driver.last_report
    facts = [driver.last_facts.get(name) for name in ("state", "step_since", "checkpoint")]
    return [report.token, report.step, *facts] if report else None


class AnsweredTime:
    """A clock that is stopped while the store does not answer.

    What happens in that time says nothing of a driver: it may have been unable to report.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._away = 0.0
        self._away_since: float | None = None

    def note(self, began: float, *, answered: bool) -> None:
        """Note whether the store answered a look, which began then by the clock."""
        if not answered and self._away_since is None:
            self._away_since = began
        elif answered and self._away_since is not None:
            self._away += began - self._away_since
            self._away_since = None

    def monotonic(self) -> float:
        """Return seconds, without those in which the store did not answer."""
        now = self._clock.monotonic() if self._away_since is None else self._away_since
        return now - self._away


class ChangeTimer:
    """Measures for how long a value has not changed, on the caller's clock."""

    def __init__(self) -> None:
        self._value: object = object()
        self._since = 0.0

    def seconds_unchanged(self, value: object, now: float) -> float:
        """Note the value at `now`; return the seconds since it last changed."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since


def judge_liveness(seen: LivenessSample, limits: LivenessLimits) -> Observation:
    """Return the conclusion from one look.

    1. A held and renewed lease means running, or stalled if the driver makes no progress.
    2. Otherwise the final report of the watched driver decides, or the error in its log.
    3. Otherwise a launched process that may still run is starting; it is stalled after
       `start_timeout`, or if it had the lease before.
    4. Otherwise the driver has ended: its exit code decides; without one it is lost.
    """
    # The order matters: a held lease is newer than any report, and a report than an exit code.
    lease, report = seen.driver.lease, seen.driver.last_report
    token = lease.token if lease else 0
    if lease is not None and _is_lease_held(lease, seen, limits):
        return _judge_holder(lease, seen, limits)
    # The report of an earlier driver says nothing about the one that was just launched.
    if report is not None and report.token >= seen.floor:
        state = parse_reported_state(report.body)
        if state in FINAL_STATES:
            return _conclude_from_report(state, report, token)
    if seen.log_error is not None:
        why = f"the driver failed before it had the lease: {seen.log_error.get('message')}"
        return Observation(PipelineState.FAILED, why, token, dict(seen.log_error))
    if seen.process_alive:
        return _judge_starting(seen, limits, token)
    if seen.exit_code is not None:
        return _conclude_from_exit_code(seen.exit_code, token)
    why, evidence = _explain_loss(lease, seen.silent_for), _note_lease(lease)
    return Observation(PipelineState.LOST, why, token, evidence=evidence)


def _note_lease(lease: LeaseView | None) -> list[Any]:
    return ["lease", lease.etag if lease else None]


def _is_lease_held(lease: LeaseView, seen: LivenessSample, limits: LivenessLimits) -> bool:
    return not lease.is_free and seen.silent_for <= lease.record.ttl + limits.lease_margin


def _judge_holder(lease: LeaseView, seen: LivenessSample, limits: LivenessLimits) -> Observation:
    holder = f"pid {lease.holder.pid} on {lease.holder.host}" if lease.holder else "no one"
    report = seen.driver.last_report
    state = parse_reported_state(seen.driver.last_facts)
    # The driver itself gives the lease back when a step takes longer than it may. So a long step
    # under a renewed lease is work: killing it would only make the next driver begin it again.
    step_limit = float(seen.driver.last_facts.get("step_limit") or 0.0)
    limit = max(limits.stall_after, step_limit)
    # A waiting driver has no steps to finish, and a starting one waits for its JVM.
    if state is PipelineState.WAITING:
        limit = float("inf")
    elif state is PipelineState.STARTING:
        limit = max(limits.start_timeout, limit)
    if seen.still_for > limit:
        step = report.step if report else "an unknown step"
        why = f"{holder} holds the lease but has been in {step} for {seen.still_for:.0f} s"
        evidence = ["progress", find_progress(seen.driver)]
        return Observation(PipelineState.STALLED, why, lease.token, evidence=evidence)
    return Observation(
        PipelineState.RUNNING, f"{holder} drives with token {lease.token}", lease.token
    )


def _judge_starting(seen: LivenessSample, limits: LivenessLimits, token: int) -> Observation:
    state = PipelineState.STALLED
    if token >= seen.floor:
        why = f"the driver runs, but its lease ran out {seen.silent_for:.0f} s ago"
    elif seen.launched_for > limits.start_timeout:
        why = f"the driver has not taken the lease within {limits.start_timeout:.0f} s"
    else:
        state = PipelineState.RUNNING
        why = f"the driver is starting ({seen.launched_for:.0f} s)"
    return Observation(state, why, token, evidence=_note_lease(seen.driver.lease))


def _conclude_from_report(state: PipelineState, report: DriverStatus, token: int) -> Observation:
    error = dict(report.body.get("error") or {})
    why = {
        PipelineState.FINISHED: "the driver says that all sources are done",
        PipelineState.STOPPED: "the driver says that it was asked to stop",
        PipelineState.FAILED: f"the driver failed: {error.get('message', 'no message')}",
    }
    return Observation(state, why[state], token, error)


def _conclude_from_exit_code(code: int, token: int) -> Observation:
    if code == 0:
        return Observation(PipelineState.STOPPED, "the driver ended with exit code 0", token)
    kind = classify_exit_code(code)
    if kind is None:  # a crash, not a decision of the driver: launching it again may help
        killed = f" (killed by signal {code - 128})" if code > 128 else ""
        why = f"the driver ended with code {code}{killed}"
        return Observation(PipelineState.LOST, why, token)
    why = f"the driver ended with exit code {code} ({kind.value}); its log says why"
    error = {"class": kind.value, "code": f"driver.exit_{code}", "message": why}
    return Observation(PipelineState.FAILED, why, token, error)


def _explain_loss(lease: LeaseView | None, silent_for: float) -> str:
    if lease is None:
        return "no driver ever ran this stream"
    holder = lease.holder
    if holder is None:
        return "no driver holds the lease"
    process = f"pid {holder.pid} on {holder.host}"
    if holder.is_proven_dead():
        return f"{process} is dead"
    return f"the lease of {process} has not been renewed for {silent_for:.0f} s"


class StreamObserver:
    """Watches one stream. Call `observe` every second or two; the first look starts the timers.

    Args:
        floor: token of the driver to watch, or the least it can get.
        launched: the process that this task launched, if it did.
        limits: how patient it is; None for the defaults.

    Attributes:
        floor: rises when another driver takes the lease, which is the watched one from then on.
        seen: the last look; None when the store did not answer.
    """

    def __init__(
        self,
        store: Store,
        pipeline: str,
        *,
        floor: int,
        launched: LaunchedDriver | None = None,
        limits: LivenessLimits | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.floor = floor
        self.seen: LivenessSample | None = None
        self._store, self._pipeline, self._launched, self._clock = store, pipeline, launched, clock
        self._limits = limits or LivenessLimits()
        self._lease = LeaseObserver(store, pipeline, clock)
        self._progress = ChangeTimer()
        self._unreadable_since: float | None = None
        self._log_read_at = clock.monotonic()
        self._answered = AnsweredTime(clock)
        self._begun = self._answered.monotonic()

    def observe(self) -> Observation | None:
        """Look once; None while the state is not known.

        That is while the store does not answer, and for five minutes while it refuses or a document
        is not readable: keys may be renewed, and a newer version may be rolled back. Then FAILED.
        """
        began = self._clock.monotonic()
        try:
            driver = read_driver(self._store, self._pipeline, self._lease)
        except TransientError:
            self._answered.note(began, answered=False)
            # The driver could not renew its lease either: its silence is timed from the store's
            # return on.
            self._lease = LeaseObserver(self._store, self._pipeline, self._clock)
            self.seen = None
            return None
        except TidegateError as error:
            self._answered.note(began, answered=True)
            self.seen = None
            return self.tolerate(error)
        self._answered.note(began, answered=True)
        self._unreadable_since = None
        if driver.lease is not None and not driver.lease.is_free:
            self.floor = max(self.floor, driver.lease.token)
        now, launched = self._answered.monotonic(), self._launched
        self.seen = LivenessSample(
            driver=driver,
            silent_for=self._lease.silent_seconds,
            floor=self.floor,
            still_for=self._progress.seconds_unchanged(find_progress(driver), now),
            process_alive=launched is not None and launched.is_alive(),
            exit_code=launched.read_exit_code() if launched else None,
            log_error=self._read_log_error(driver.lease, self._clock.monotonic()),
            launched_for=now - self._begun,
        )
        return replace(judge_liveness(self.seen, self._limits), floor=self.floor)

    def _read_log_error(self, lease: LeaseView | None, now: float) -> JsonObject | None:
        """The error of a launched driver on another host that ended before it had the lease."""
        launched = self._launched
        if launched is None or is_on_this_host(launched.leader):
            return None
        # A driver that took the lease reports its end itself.
        if lease is not None and (lease.token >= self.floor or not lease.is_free):
            return None
        # Drivers send their log at this interval; looking more often shows nothing new.
        if now - self._log_read_at < LOG_SEND_SECONDS:
            return None
        self._log_read_at = now
        with suppress(TidegateError):
            for line in reversed(read_log_tail(self._store, self._pipeline, launched.attempt, 20)):
                with suppress(ValueError):
                    entry = json.loads(line)
                    if isinstance(entry, dict) and entry.get("event") == "ended":
                        return entry if "class" in entry else None
        return None

    def tolerate(self, error: TidegateError) -> Observation | None:
        """Return None at first; FAILED with this error when it has lasted `UNREADABLE_PATIENCE`."""
        now = self._answered.monotonic()
        if self._unreadable_since is None:
            self._unreadable_since = now
        lasted = now - self._unreadable_since
        if lasted < UNREADABLE_PATIENCE:
            return None
        why = f"the bucket could not be read for {lasted:.0f} s: {error.message}"
        return Observation(PipelineState.FAILED, why, self.floor, error.as_dict())
