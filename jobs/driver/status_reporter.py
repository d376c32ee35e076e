"""What the driver says about itself in ``status.json``.

Read by Airflow, the command line and people; never trusted for data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import structlog

from tidegate.checkpoints.driver_reports import DriverStatus, write_status
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.lease_renewal import LeaseRenewer
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.store import Store
from tidegate.errors import TidegateError
from tidegate.jobs.driver.log_output import bind_log_context
from tidegate.jobs.eventtime.decision_types import Decision
from tidegate.time_units import format_instant

HEARTBEAT_INTERVAL = (
    2.0  # seconds; with the observer's own patience of 6 s a lost driver is seen in under 10 s
)

_log = structlog.get_logger("tidegate.driver")


class StatusReporter:
    """Keeps ``status.json`` fresh.

    At once when the state changes, and every two seconds in between.

    Args:
        facts: what does not change, as names and values.
        silent_after: ticks after which a source without a word is named; None for never.
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        steps: DriverSteps,
        facts: dict[str, Any],
        clock: Clock = SYSTEM_CLOCK,
        *,
        silent_after: int | None = None,
    ) -> None:
        self._store, self._lease, self._steps, self._clock = store, lease, steps, clock
        self._silent_after = silent_after
        self._facts: dict[str, Any] = {"started_at": clock.wall_ticks(), **facts}
        self._extra: Callable[[], dict[str, Any]] = dict
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._write_periodically, name="tidegate-status", daemon=True
        )
        self.state = "starting"

    def start(self, extra: Callable[[], dict[str, Any]]) -> None:
        """Begin to beat; `extra` adds live facts (unpublished epochs, trouble)."""
        self._extra = extra
        self._thread.start()

    def set_state(
        self, state: str, *, error: TidegateError | None = None, why: str | None = None
    ) -> None:
        """Change the state and write it now."""
        self.state = state
        with self._lock:
            self._facts["error"] = error.as_dict() if error else None
            self._facts["why"] = why
        self.write()

    def record_epoch(self, manifest: Manifest, seconds: float) -> None:
        """Note a sealed epoch."""
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

    def record_decision(self, decision: Decision) -> None:
        """Note what the last cut meant, sealed or not."""
        with self._lock:
            self._facts |= {
                "frontier": decision.frontier_after,
                "frontier_text": format_instant(decision.frontier_after),
                "statuses": decision.statuses,
                "holder": decision.holder,
                "blocked": list(decision.blocked),
                "members": read_member_frontiers(decision),
                "silent": find_silent_sources(decision, self._silent_after),
            }

    def snapshot(self) -> dict[str, Any]:
        """What is known now."""
        with self._lock:
            return {
                **self._facts,
                **self._extra(),
                "state": self.state,
                "step_since": self._steps.since,
            }

    def write(self) -> None:
        """Write now. A store that does not answer is not worth stopping for."""
        status = DriverStatus(
            token=self._lease.token,
            driver=self._lease.holder.driver,
            step=self._steps.current,
            at=self._clock.wall_ticks(),
            body={**self.snapshot(), "holder_process": self._lease.holder.model_dump()},
        )
        try:
            write_status(self._store, self._facts["pipeline"], status)
        except TidegateError as error:
            _log.warning("status_not_written", error=error.message)

    def stop(self) -> None:
        """End the beat."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    def _write_periodically(self) -> None:
        while not self._stop.wait(HEARTBEAT_INTERVAL):
            self.write()


def find_silent_sources(decision: Decision, after: int | None) -> dict[str, int]:
    """Sources without a word for at least so many ticks, on the pipeline clock, and for how many.

    None that is done.
    """
    inputs = decision.after.get("output", {}).get("inputs", {})
    silent = {name: decision.now - at for name, at in decision.after.get("active_at", {}).items()}
    return {
        name: ticks
        for name, ticks in silent.items()
        if after is not None and ticks >= after and inputs.get(name, {}).get("status") != "done"
    }


def read_member_frontiers(decision: Decision) -> dict[str, int | None]:
    """Frontier per member, as the decider's state has it."""
    sources = decision.after.get("sources", {})
    return {
        name: known["frontier"]
        for source in sources.values()
        for name, known in source["inputs"].items()
    }


# The steps of an epoch as the driver watches them: a deadline for the lease, a name for the status,
# seconds for the manifest.

STEP_DEADLINES: Final[Mapping[str, float]] = {
    "plan": (
        120.0
    ),  # listing and footers; a slow store answers within its own budget of 30 s per request
    "survey": 1800.0,  # one Spark job over the cut
    "decide": 60.0,
    "move": 3600.0,  # the whole epoch's rows
    "seal": 60.0,  # twice the seal's own budget
    "wait": 120.0,
    "start": 300.0,  # a cold JVM on a busy machine
    "publish": 3600.0,
}
"""Seconds a step may take before the driver counts as wedged and its lease runs out."""


class DriverSteps:
    """Implements `tidegate.jobs.engine.epoch_engine.Steps` on a lease keeper."""

    def __init__(self, keeper: LeaseRenewer) -> None:
        self._keeper = keeper
        self._timings: dict[str, float] = {}
        self.current = "start"
        self.since = 0
        self.enter("start")

    def enter(self, name: str) -> None:
        """Announce a step without measuring it."""
        self.current, self.since = name, SYSTEM_CLOCK.wall_ticks()
        self._keeper.announce_step(name, STEP_DEADLINES[name])

    @contextmanager
    def measure_step(self, name: str) -> Iterator[None]:
        """Announce and measure a step; after it, the driver counts as between steps."""
        self.enter(name)
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._timings[name] = self._timings.get(name, 0.0) + time.perf_counter() - begun
            self.enter("wait")

    def begin_attempt(self, epoch: int, name: str) -> None:
        """Let the log say which attempt is under way."""
        bind_log_context(epoch=epoch, attempt=name)

    def require_lease(self) -> int:
        """The token of the lease, checked now. Raises FencedError when it is gone."""
        self._keeper.lease.ensure_held()
        return self._keeper.lease.token

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds per step since `begin_epoch`."""
        return dict(self._timings)

    def begin_epoch(self) -> None:
        """Forget the last epoch's timings, but for its seal.

        No manifest can hold the time of its own.
        """
        seal = self._timings.get("seal")
        self._timings = {} if seal is None else {"seal_before": seal}
