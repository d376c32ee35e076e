"""What the driver says about itself in ``status.json``: read by Airflow, the command line and people; never trusted for data."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import structlog

from tidegate.checkpoints.clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.status import DriverStatus, write_status
from tidegate.checkpoints.store import Store
from tidegate.jobs.driver.steps import DriverSteps
from tidegate.jobs.eventtime.types import Decision
from tidegate.jobs.spec.errors import TidegateError
from tidegate.jobs.spec.time import format_instant

__all__ = ["HEARTBEAT_INTERVAL", "StatusReporter"]

HEARTBEAT_INTERVAL = 2.0  # seconds; with the observer's own patience of 6 s a lost driver is seen in under 10 s

_log = structlog.get_logger("tidegate.driver")


class StatusReporter:
    """Keeps ``status.json`` fresh: at once when the state changes, and every two seconds in between.

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
        self._thread = threading.Thread(target=self._write_periodically, name="tidegate-status", daemon=True)
        self.state = "starting"

    def start(self, extra: Callable[[], dict[str, Any]]) -> None:
        """Begin to beat; `extra` adds live facts (unpublished epochs, trouble)."""
        self._extra = extra
        self._thread.start()

    def set_state(self, state: str, *, error: TidegateError | None = None, why: str | None = None) -> None:
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
            return {**self._facts, **self._extra(), "state": self.state, "step_since": self._steps.since}

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
    """Sources without a word for at least so many ticks, on the pipeline clock, and for how many; none that is done."""
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
    return {name: known["frontier"] for source in sources.values() for name, known in source["inputs"].items()}
