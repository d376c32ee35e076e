"""The loop of the driver: requests, one epoch, publishing, a pause; until something ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tidegate.errors import TransientError
from tidegate.jobs.driver.error_classification import detect_full_disk
from tidegate.jobs.driver.operator_requests import RequestInbox
from tidegate.jobs.driver.status_reporter import DriverSteps, StatusReporter
from tidegate.jobs.engine.epoch_engine import Engine, EpochReport, EpochRequests
from tidegate.jobs.engine.fault_points import Faults
from tidegate.jobs.engine.publisher import Publisher
from tidegate.jobs.spec.pipeline import PipelineSpec

_log = structlog.get_logger("tidegate.driver")

_HOLD_POLL_INTERVAL = 0.2  # seconds, while a merge has the next slot
# Seconds, doubling from the first to the longest. The store's own retries, up to 30 s, come on top.
_FIRST_BACKOFF, _LONGEST_BACKOFF = 1.0, 15.0


@dataclass(frozen=True, slots=True)
class EndConditions:
    """What ends a run without a request.

    Attributes:
        idle: seconds without a row and with nothing pending.
        epochs: sealed epochs.
    """

    idle: float | None = None
    epochs: int | None = None


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended: the last state for ``status.json`` and a sentence."""

    state: str
    why: str


@dataclass(frozen=True, slots=True)
class LoopRuntime:
    """What the loop uses beside the engine and the publisher.

    Attributes:
        spec: the pipeline.
        steps: announces the current step, and knows whether the lease is lost.
        status: writes ``status.json``.
        inbox: requests of operators.
        stop: set when the driver should end.
        faults: fault points of tests.
        on_epoch: called with the report of each epoch and its seconds.
    """

    spec: PipelineSpec
    steps: DriverSteps
    status: StatusReporter
    inbox: RequestInbox
    stop: threading.Event
    faults: Faults
    on_epoch: Callable[[EpochReport, float], None]


class EpochLoop:
    """Runs epochs until the pipeline is stopped or finished, or an error is not transient."""

    def __init__(
        self,
        engine: Engine,
        publisher: Publisher,
        runtime: LoopRuntime,
        until: EndConditions,
    ) -> None:
        self._engine, self._publisher, self._until = engine, publisher, until
        self._runtime, self._spec = runtime, runtime.spec
        self._steps, self._status, self._stop = runtime.steps, runtime.status, runtime.stop
        self._sealed_epochs = 0
        self._quiet_since = time.monotonic()
        self._backoff = _FIRST_BACKOFF

    def run(self) -> RunOutcome:
        """Run epochs until the run ends, and return why it ended.

        Raises:
            TidegateError: fenced, poison or configuration. Transient errors are waited out.
        """
        self._status.set_state("running")
        while True:
            outcome = self._check_end_conditions()
            if outcome is not None:
                return outcome
            begun = time.monotonic()
            try:
                report = self._run_epoch()
            except Exception as error:
                self._wait_and_reload(_require_transient(self._spec.name, error))
                continue
            self._record_outcome(report, time.monotonic() - begun)
            if report.ended and not report.pending:
                return RunOutcome("finished", "every source is bounded and read to its end")
            self._pause_between_epochs(report, begun)

    def _check_end_conditions(self) -> RunOutcome | None:
        if self._steps.lost.is_set():
            raise self._steps.error or RuntimeError("lease lost without an error")
        if self._stop.is_set():
            return RunOutcome("stopped", "a signal or a request asked for it")
        if self._until.epochs is not None and self._sealed_epochs >= self._until.epochs:
            return RunOutcome("stopped", f"{self._sealed_epochs} epochs were asked for")
        quiet = time.monotonic() - self._quiet_since
        if self._until.idle is not None and quiet >= self._until.idle:
            return RunOutcome("stopped", f"no row for {self._until.idle:g} s")
        return None

    def _run_epoch(self) -> EpochReport:
        self._steps.begin_epoch()
        self._wait_for_publisher()
        report = self._engine.run_epoch(self._collect_requests())
        if report.lost:
            _log.warning(
                "slot_lost", advice="another driver or a restore filled it; going on after it"
            )
        if report.sealed:
            self._publisher.note_sealed(report.sealed.slot)
            self._runtime.inbox.acknowledge_applied(report)
        self._runtime.faults.reach("report")
        return report

    def _collect_requests(self) -> EpochRequests:
        """Return the requests for the coming epoch.

        A merge that asked for the next slot gets it first: this waits until its hold is over.
        """
        inbox = self._runtime.inbox
        requests = inbox.collect()
        while inbox.held is not None and not self._stop.is_set():
            merge = inbox.held
            self._steps.enter("wait")
            self._status.set_state(
                "waiting",
                why=f"{merge.who} merges splice request {merge.name}, which has the next slot",
            )
            self._stop.wait(_HOLD_POLL_INTERVAL)
            requests = inbox.collect()
        return requests

    def _wait_for_publisher(self) -> None:
        limit = self._spec.outputs.max_unpublished
        while not self._publisher.wait_below(limit, timeout=2.0):
            unpublished = self._publisher.unpublished_count
            self._steps.enter("wait")
            self._status.set_state(
                "waiting",
                error=self._publisher.trouble,
                why=f"{unpublished} epochs are sealed but not in the tables yet",
            )
            if self._stop.is_set():
                return
        if self._status.state == "waiting":
            self._status.set_state("running")

    def _record_outcome(self, report: EpochReport, seconds: float) -> None:
        self._backoff = _FIRST_BACKOFF
        self._status.record_decision(report.decision)
        if report.manifest is not None:
            self._sealed_epochs += 1
            self._status.record_epoch(report.manifest, seconds)
        if report.rows or report.pending:
            self._quiet_since = time.monotonic()
        if self._status.state != "running":
            self._status.set_state("running")
        self._runtime.on_epoch(report, seconds)

    def _pause_between_epochs(self, report: EpochReport, begun: float) -> None:
        checkpoint = self._spec.checkpoint
        rest = checkpoint.min_interval / 1e6 - (time.monotonic() - begun)
        if not report.rows and not report.pending and not report.lost:
            rest = max(rest, checkpoint.idle_interval / 1e6)
        self._steps.enter("wait")
        if rest > 0:
            self._stop.wait(rest)

    def _wait_and_reload(self, error: TransientError) -> None:
        """Report a transient error, wait, and read the head of the log again."""
        _log.warning("transient", code=error.code, error=error.message, again_in=self._backoff)
        self._steps.enter("wait")
        self._status.set_state("waiting", error=error, why="trying again by itself")
        self._stop.wait(max(self._backoff, error.retry_after or 0.0))
        self._backoff = min(_LONGEST_BACKOFF, 2 * self._backoff)
        try:
            self._engine.reload()
        except TransientError:
            return  # the next epoch meets the same store and comes back here
        # If the store was away, the document above was not written.
        self._status.write()


def _require_transient(pipeline: str, error: Exception) -> TransientError:
    """Return the error if this process can wait it out; raise any other error again."""
    transient = error if isinstance(error, TransientError) else detect_full_disk(pipeline, error)
    if transient is None:
        raise error
    return transient
