"""Is the stream alive?

Pure judgement over what can be seen: the lease, the status object and the launched process.

    live      somebody drives: the lease was renewed within its TTL, and steps go on (or the
        launched driver is starting)
    lost      nobody drives, and nobody said that this was intended
    stalled   somebody holds on but does nothing: no finished step for `stall_after`, or never took
    the lease finished  the driver said that it is finished            stopped  it said that it was
    asked to stop failed    it said what is wrong, or its exit code does

Nothing here compares clocks of two hosts: silence and standstill are timed by the observer, on its
own clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from tidegate.checkpoints.driver_reports import read_status
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.lease import LeaseObserver, LeaseView
from tidegate.checkpoints.store import Store
from tidegate.errors import FailureClass, TransientError
from tidegate.operators.child_processes import classify_exit_code
from tidegate.operators.driver_launch import LaunchedDriver

_FINAL_STATES: Final = frozenset({"finished", "stopped", "failed"})


class StreamLiveness(StrEnum):
    """What an observer concludes. Only LIVE needs no action."""

    LIVE = "live"
    LOST = "lost"
    STALLED = "stalled"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class LivenessLimits:
    """How patient an observer is, in seconds.

    Attributes:
        start_timeout: from launch to the lease: a JVM with a cold jar cache on a busy machine may
            need a minute.
        stall_after: no finished step for this long.
        lease_margin: added to the TTL, for the time between the holder's renewal and our look.
    """

    start_timeout: float = 180.0
    stall_after: float = 120.0
    lease_margin: float = 1.0


@dataclass(frozen=True)
class LivenessSample:
    """What was seen in one look.

    Attributes:
        lease: as it lies in the bucket; None if there never was one.
        silent_for: seconds its ETag has not changed, on the observer's clock.
        status: the status object, whoever wrote it; None if there is none.
        floor: a status with a token below this was written by a driver before the one that is
            watched.
        still_for: seconds without progress, on the observer's clock.
        process_alive: the process we started may still run.
        exit_code: it ended with this.
        launched_for: seconds since it was started.
    """

    lease: LeaseView | None
    silent_for: float
    status: Mapping[str, Any] | None
    floor: int
    still_for: float = 0.0
    process_alive: bool = False
    exit_code: int | None = None
    launched_for: float = 0.0


@dataclass(frozen=True)
class Observation:
    """The conclusion, JSON-ready: it travels from the trigger to the task.

    Attributes:
        why: one sentence for the task log.
        token: of the lease that was looked at; 0 without one.
        error: as the driver reported it (`TidegateError.as_dict`), for FAILED.
    """

    state: StreamLiveness
    why: str
    token: int = 0
    error: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "state": self.state.value,
            "why": self.why,
            "token": self.token,
            "error": self.error,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Observation:
        """Inverse of `as_dict`."""
        return cls(
            StreamLiveness(data["state"]), str(data["why"]), int(data["token"]), dict(data["error"])
        )


class ChangeTimer:
    """For how long has a value been the same, on the caller's clock?"""

    def __init__(self) -> None:
        self._value: object = object()
        self._since = 0.0

    def seconds_unchanged(self, value: object, now: float) -> float:
        """Note the value and say for how long it has not changed."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since


def extract_progress(status: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """What changes whenever a driver finishes a step."""
    return tuple(
        (status or {}).get(key) for key in ("token", "state", "step", "step_since", "checkpoint")
    )


def judge_liveness(seen: LivenessSample, rules: LivenessLimits) -> Observation:
    """Conclude from one look.

    1. The lease is held and renewed: live, unless nothing moves.
    2. Else a driver that we started may still be on its way to the lease.
    3. Else it ended: its exit code, then its last words decide; without either it is lost.
    """
    token = seen.lease.token if seen.lease else 0
    words = _read_final_status(seen)
    if _is_lease_held(seen, rules):
        return _judge_holder(seen, rules, token)
    if seen.process_alive and words is None:
        return _judge_starting(seen, rules, token)
    if words is not None:
        return _conclude_from_status(words, token)
    if seen.exit_code is not None:
        return _conclude_from_exit_code(seen.exit_code, token)
    return Observation(StreamLiveness.LOST, _explain_loss(seen), token)


def _is_lease_held(seen: LivenessSample, rules: LivenessLimits) -> bool:
    lease = seen.lease
    if lease is None or lease.is_free:
        return False
    return seen.silent_for <= lease.record.ttl + rules.lease_margin


def _judge_holder(seen: LivenessSample, rules: LivenessLimits, token: int) -> Observation:
    holder = seen.lease.holder if seen.lease else None
    name = f"pid {holder.pid} on {holder.host}" if holder else "nobody"
    status = seen.status or {}
    # A waiting driver has nothing to finish; a starting one waits for its JVM.
    patience = {"waiting": float("inf"), "starting": rules.start_timeout}.get(
        str(status.get("state")), rules.stall_after
    )
    if seen.still_for > max(patience, rules.stall_after):
        step = status.get("step", "an unknown step")
        return Observation(
            StreamLiveness.STALLED,
            f"{name} holds the lease but stands in {step} for {seen.still_for:.0f} s",
            token,
        )
    return Observation(StreamLiveness.LIVE, f"{name} drives with token {token}", token)


def _judge_starting(seen: LivenessSample, rules: LivenessLimits, token: int) -> Observation:
    if token >= seen.floor:
        return Observation(
            StreamLiveness.STALLED,
            f"the driver runs, but its lease ran out {seen.silent_for:.0f} s ago",
            token,
        )
    if seen.launched_for > rules.start_timeout:
        return Observation(
            StreamLiveness.STALLED,
            f"the driver has not taken the lease within {rules.start_timeout:.0f} s",
            token,
        )
    return Observation(
        StreamLiveness.LIVE, f"the driver is starting ({seen.launched_for:.0f} s)", token
    )


def _read_final_status(seen: LivenessSample) -> Mapping[str, Any] | None:
    """The status of the watched driver, if it says that it has ended."""
    status = seen.status
    if (
        status is None
        or status.get("state") not in _FINAL_STATES
        or int(status.get("token") or 0) < seen.floor
    ):
        return None
    return status


def _conclude_from_status(status: Mapping[str, Any], token: int) -> Observation:
    state = StreamLiveness(status["state"])
    error = dict(status.get("error") or {})
    said = {
        StreamLiveness.FINISHED: "the driver says that all sources are done",
        StreamLiveness.STOPPED: "the driver says that it was asked to stop",
        StreamLiveness.FAILED: f"the driver failed: {error.get('message', 'no message')}",
    }
    return Observation(state, said[state], token, error)


def _conclude_from_exit_code(code: int, token: int) -> Observation:
    if code == 0:
        return Observation(StreamLiveness.STOPPED, "the driver ended with exit code 0", token)
    kind = classify_exit_code(code)
    if kind is None:
        return Observation(
            StreamLiveness.LOST, f"the driver ended with code {code}{_format_signal(code)}", token
        )
    message = f"the driver ended with exit code {code} ({kind.value}); its log says why"
    return Observation(
        StreamLiveness.FAILED,
        message,
        token,
        {"class": kind.value, "code": f"driver.exit_{code}", "message": message},
    )


def _format_signal(code: int) -> str:
    return f" (killed by signal {code - 128})" if code > 128 else ""


def _explain_loss(seen: LivenessSample) -> str:
    lease = seen.lease
    if lease is None:
        return "nobody ever drove this stream"
    if lease.holder is None:
        return "nobody holds the lease"
    if lease.holder.is_proven_dead():
        return f"pid {lease.holder.pid} on {lease.holder.host} is dead"
    return (
        f"the lease of pid {lease.holder.pid} on {lease.holder.host} has not been renewed for"
        f" {seen.silent_for:.0f} s"
    )


def needs_person(observation: Observation) -> bool:
    """Whether a person has to act before trying again makes sense."""
    return observation.state is StreamLiveness.FAILED and observation.error.get("class") in (
        FailureClass.POISON.value,
        FailureClass.CONFIGURATION.value,
    )


# The eyes of a supervisor: one look at bucket and process, timed on its own clock, judged by
# `watch`.


class StreamObserver:
    """Watches one stream.

    Call `observe` every second or two; the first looks only start the clocks.

    Args:
        floor: token of the driver to watch (or the least it can get); words of earlier drivers do
            not count.
        launched: the process we started, if we did.

    Attributes:
        floor: follows the lease when another driver takes over: whoever drives now is the one that
            is watched.
        seen: in the last look; None when the store did not answer it.
    """

    def __init__(
        self,
        store: Store,
        pipeline: str,
        *,
        floor: int,
        launched: LaunchedDriver | None = None,
        rules: LivenessLimits | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.floor = floor
        self.seen: LivenessSample | None = None
        self._store, self._pipeline, self._launched, self._clock = store, pipeline, launched, clock
        self._rules = rules or LivenessLimits()
        self._lease = LeaseObserver(store, pipeline, clock)
        self._progress = ChangeTimer()
        self._begun = clock.monotonic()

    def observe(self) -> Observation | None:
        """One look; None while the store does not answer.

        Then nothing is known, neither good nor bad.
        """
        try:
            lease = self._lease.observe()
            status = read_flat_status(self._store, self._pipeline)
        except TransientError:
            # The driver could not renew either: its silence must not be counted from before the
            # outage.
            self._lease = LeaseObserver(self._store, self._pipeline, self._clock)
            self.seen = None
            return None
        self._follow_lease(lease)
        now = self._clock.monotonic()
        self.seen = LivenessSample(
            lease=lease,
            silent_for=self._lease.silent_seconds,
            status=status,
            floor=self.floor,
            still_for=self._progress.seconds_unchanged(extract_progress(status), now),
            process_alive=self._launched is not None and self._launched.is_alive(),
            exit_code=self._launched.read_exit_code() if self._launched else None,
            launched_for=now - self._begun,
        )
        return judge_liveness(self.seen, self._rules)

    def _follow_lease(self, lease: LeaseView | None) -> None:
        if lease is not None and not lease.is_free:
            self.floor = max(self.floor, lease.token)


def read_flat_status(store: Store, pipeline: str) -> dict[str, Any] | None:
    """The driver's last report as one flat mapping; None if there is none."""
    status = read_status(store, pipeline)
    return None if status is None else {**status.body, **status.model_dump(exclude={"body"})}
