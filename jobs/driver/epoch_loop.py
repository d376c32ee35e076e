"""The loop of the driver.

Requests, an epoch, publish, wait; until somebody or something ends it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tidegate.checkpoints.lease_renewal import LeaseRenewer
from tidegate.errors import TransientError
from tidegate.jobs.driver.error_classification import detect_full_disk
from tidegate.jobs.driver.operator_requests import RequestInbox
from tidegate.jobs.driver.status_reporter import DriverSteps, StatusReporter
from tidegate.jobs.engine.epoch_engine import Engine, EpochReport, EpochRequests
from tidegate.jobs.engine.fault_points import Faults
from tidegate.jobs.engine.publisher import PublisherGroup
from tidegate.jobs.spec.pipeline import PipelineSpec

_log = structlog.get_logger("tidegate.driver")

_HOLD_POLL_INTERVAL = 0.2  # seconds, while a merge has the next slot
_FIRST_BACKOFF, _LONGEST_BACKOFF = (
    1.0,
    15.0,
)  # seconds, doubling; the store's own budget of 30 s comes on top


@dataclass(frozen=True, slots=True)
class EndConditions:
    """What ends a run by itself.

    Attributes:
        idle: seconds without a row and with nothing waiting.
        epochs: sealed epochs.
    """

    idle: float | None = None
    epochs: int | None = None


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Why the loop ended: the state for ``status.json`` and a sentence."""

    state: str
    why: str


class EpochLoop:
    """Runs until stopped, finished, or an error that is not transient."""

    def __init__(
        self,
        spec: PipelineSpec,
        engine: Engine,
        publisher: PublisherGroup,
        keeper: LeaseRenewer,
        steps: DriverSteps,
        status: StatusReporter,
        inbox: RequestInbox,
        faults: Faults,
        stop: threading.Event,
        until: EndConditions,
        on_epoch: Callable[[EpochReport, float], None],
    ) -> None:
        self._spec, self._engine, self._publisher = spec, engine, publisher
        self._keeper, self._steps, self._status = keeper, steps, status
        self._inbox, self._faults, self._stop, self._until = inbox, faults, stop, until
        self._on_epoch = on_epoch
        self._sealed = 0
        self._quiet_since = time.monotonic()
        self._backoff = _FIRST_BACKOFF

    def run(self) -> RunOutcome:
        """Epoch after epoch.

        Raises:
            TidegateError: fenced, poison or configuration; transient ones are waited out.
        """
        self._status.set_state("running")
        while True:
            ended = self._check_end_conditions()
            if ended is not None:
                return ended
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
        if self._keeper.lost.is_set():
            raise self._keeper.error or RuntimeError("lease lost without an error")
        if self._stop.is_set():
            return RunOutcome("stopped", "a signal or a request asked for it")
        if self._until.epochs is not None and self._sealed >= self._until.epochs:
            return RunOutcome("stopped", f"{self._sealed} epochs were asked for")
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
            self._inbox.acknowledge_applied(report)
        self._faults.reach("report")
        return report

    def _collect_requests(self) -> EpochRequests:
        """What people ask of the coming epoch.

        A merge that asks for the next slot gets it first.
        """
        asked = self._inbox.collect()
        while self._inbox.held is not None and not self._stop.is_set():
            merge = self._inbox.held
            self._steps.enter("wait")
            self._status.set_state(
                "waiting",
                why=f"{merge.who} merges splice request {merge.name}, which has the next slot",
            )
            self._stop.wait(_HOLD_POLL_INTERVAL)
            asked = self._inbox.collect()
        return asked

    def _wait_for_publisher(self) -> None:
        limit = self._spec.outputs.max_unpublished
        while not self._publisher.wait_below(limit, timeout=2.0):
            trouble = self._publisher.trouble
            self._steps.enter("wait")
            self._status.set_state(
                "waiting",
                error=trouble,
                why=(
                    f"{self._publisher.unpublished_count} epochs are sealed but not in the"
                    " tables yet"
                ),
            )
            if self._stop.is_set():
                return
        if self._status.state == "waiting":
            self._status.set_state("running")

    def _record_outcome(self, report: EpochReport, seconds: float) -> None:
        self._backoff = _FIRST_BACKOFF
        self._status.record_decision(report.decision)
        if report.manifest is not None:
            self._sealed += 1
            self._status.record_epoch(report.manifest, seconds)
        if report.rows or report.pending:
            self._quiet_since = time.monotonic()
        if self._status.state != "running":
            self._status.set_state("running")
        self._on_epoch(report, seconds)

    def _pause_between_epochs(self, report: EpochReport, begun: float) -> None:
        checkpoint = self._spec.checkpoint
        rest = checkpoint.min_interval / 1e6 - (time.monotonic() - begun)
        if not report.rows and not report.pending and not report.lost:
            rest = max(rest, checkpoint.idle_interval / 1e6)
        self._steps.enter("wait")
        if rest > 0:
            self._stop.wait(rest)

    def _wait_and_reload(self, error: TransientError) -> None:
        """Say what is wrong, wait, stand where the log stands now, try again."""
        _log.warning("transient", code=error.code, error=error.message, again_in=self._backoff)
        self._steps.enter("wait")
        self._status.set_state("waiting", error=error, why="trying again by itself")
        self._stop.wait(max(self._backoff, error.retry_after or 0.0))
        self._backoff = min(_LONGEST_BACKOFF, 2 * self._backoff)
        try:
            self._engine.reload()
        except TransientError:
            return  # the next epoch meets the same store and comes back here
        self._status.write()  # while the store was away nobody could be told


def _require_transient(pipeline: str, error: Exception) -> TransientError:
    """The error, if this very process can outlive it; any other is raised on."""
    known = error if isinstance(error, TransientError) else detect_full_disk(pipeline, error)
    if known is None:
        raise error
    return known
