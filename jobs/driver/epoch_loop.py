"""The loop of the driver: requests, one epoch, publishing, a pause; until something ends it."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tidegate.checkpoints.store import StoreDeniedError
from tidegate.errors import TidegateError, TransientError
from tidegate.jobs.engine.epoch_engine import Engine, EpochReport, EpochRequests
from tidegate.jobs.engine.interfaces import Faults
from tidegate.jobs.engine.publisher import Publisher
from tidegate.jobs.spec.pipeline import PipelineSpec

from .error_classification import detect_full_disk
from .operator_requests import RequestInbox
from .status_reporter import DriverSteps, StatusReporter

_log = structlog.get_logger("tidegate.driver")

_HOLD_POLL_INTERVAL = 0.2  # seconds, while a merge has the next slot
# Seconds between two looks for requests while the driver waits for sinks.
_SINK_POLL_INTERVAL = 2.0
# Seconds without an own epoch after which the driver reads the head of the log. A merge may have
# filled a slot meanwhile, and on a quiet stream nothing else would tell the sinks.
_HEAD_POLL_INTERVAL = 30.0
# Seconds for which a store that refuses a running driver's credentials is asked again. Expired keys
# are renewed and policies rolled out while drivers run; a key that was withdrawn stays refused.
DENIED_PATIENCE = 600.0
# Seconds, doubling from the first to the longest. The store's own retries, up to 30 s, come on top.
_FIRST_BACKOFF, _LONGEST_BACKOFF = 1.0, 15.0


@dataclass(frozen=True)
class EndConditions:
    """What ends a run without a request.

    Attributes:
        idle: seconds without a row and with nothing pending. Only time in which epochs could look
            for rows counts: neither an outage nor a wait for sinks is silence.
        epochs: number of epochs that this run has sealed.
    """

    idle: float | None = None
    epochs: int | None = None


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        state: the last state for ``status.json``: stopped or finished.
        why: a sentence.
        trouble: the error of the last epoch that was tried, if none has succeeded since.
    """

    state: str
    why: str
    trouble: TidegateError | None = None


@dataclass
class EpochLoop:
    """Runs epochs until the pipeline is stopped or finished, or an error is not transient.

    Attributes:
        engine: runs one epoch.
        publisher: has the sinks follow the log.
        until: what ends the run without a request.
        spec: the pipeline.
        steps: announces the current step, and knows whether the lease is lost.
        status: writes ``status.json``.
        inbox: requests of operators.
        stop: set when the driver should end.
        faults: fault points of tests.
        on_epoch: called with the report of each epoch, sealed or not, and its seconds.
        monotonic: seconds on a clock that never goes back.
    """

    engine: Engine
    publisher: Publisher
    until: EndConditions
    spec: PipelineSpec
    steps: DriverSteps
    status: StatusReporter
    inbox: RequestInbox
    stop: threading.Event
    faults: Faults
    on_epoch: Callable[[EpochReport, float], None]
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._sealed_epochs = 0
        self._quiet_since = self._head_read_at = self.monotonic()
        self._backoff = _FIRST_BACKOFF
        self._trouble: TidegateError | None = None  # of the newest epoch
        self._denied_for = 0.0  # seconds that this process has waited for a store that refuses

    @property
    def trouble(self) -> TidegateError | None:
        """The error of the last epoch that was tried; None once one has succeeded."""
        return self._trouble

    def run(self) -> RunOutcome:
        """Run epochs until the run ends, and return why it ended.

        Raises:
            TidegateError: fenced, poison or configuration. Transient errors and a full disk are
                waited out without a limit, a store that refuses the credentials for ten minutes.
            Exception: any other, as it is.
        """
        self.status.set_state("running")
        # The engine may have read a later head than the one that the sinks began with.
        self._publish_to_head()
        while True:
            outcome = self._check_end_conditions()
            if outcome is not None:
                return outcome
            begun = self.monotonic()
            try:
                # The end conditions are checked again while the publisher catches up.
                if not self._wait_for_publisher():
                    continue
                report = self._run_epoch()
                self._record_outcome(report, self.monotonic() - begun)
                if report.ended and not report.pending and (outcome := self._finish()):
                    return outcome
            except Exception as error:
                trouble = self._require_passing(error)
            else:
                self._pause_between_epochs(report, begun)
                continue
            # Another driver may have sealed meanwhile, so the head is read again. Not in the block
            # above: what is met here would seem to come from that error.
            self._wait_and_reload(trouble)

    def _check_end_conditions(self) -> RunOutcome | None:
        self.steps.require_not_lost()
        if self.stop.is_set():
            return RunOutcome("stopped", "a signal or a request asked for it", self._trouble)
        if self.until.epochs is not None and self._sealed_epochs >= self.until.epochs:
            return RunOutcome("stopped", f"{self._sealed_epochs} epochs were asked for")
        quiet = self.monotonic() - self._quiet_since
        if self.until.idle is not None and quiet >= self.until.idle:
            return RunOutcome("stopped", f"no row for {self.until.idle:g} s")
        return None

    def _run_epoch(self) -> EpochReport:
        self.steps.begin_epoch()
        report = self.engine.run_epoch(self._collect_requests())
        if report.lost:
            _log.warning(
                "slot_lost", advice="another driver or a restore filled it; going on after it"
            )
        if report.sealed or report.lost:
            self._publish_to_head()
        elif self.monotonic() - self._head_read_at >= _HEAD_POLL_INTERVAL:
            self._follow_head()
        if report.sealed:
            self.inbox.acknowledge_applied(report)
        self.faults.reach("report")
        return report

    def _follow_head(self) -> None:
        """Read the head of the log again, and publish up to it.

        An epoch may be sealed without an answer that this driver has seen, and merges fill slots
        as well. The sinks learn of them here.
        """
        self.engine.reload()
        self._publish_to_head()

    def _publish_to_head(self) -> None:
        self._head_read_at = self.monotonic()
        self.publisher.note_sealed(*self._head)

    def _collect_requests(self) -> EpochRequests:
        """Return the requests for the coming epoch.

        A merge that asked for the next slot gets it first: this waits until its hold is over.
        """
        inbox = self.inbox
        requests = inbox.collect()
        if inbox.held is None:
            return requests
        while inbox.held is not None and not self.stop.is_set():
            self.steps.require_not_lost()
            merge = inbox.held
            self.steps.enter("wait")
            self.status.set_state(
                "waiting",
                why=f"{merge.who} merges splice request {merge.name}, which has the next slot",
            )
            self.stop.wait(_HOLD_POLL_INTERVAL)
            inbox.collect()
        self._quiet_since = self.monotonic()
        # The merge has probably filled the slot, and its manifest names requests as well.
        self._follow_head()
        return inbox.collect()

    def _wait_for_publisher(self) -> bool:
        """Wait while too many epochs are unpublished; return False if the run should end."""
        limit = self.spec.outputs.max_unpublished
        while not self.publisher.wait_below(limit, timeout=_SINK_POLL_INTERVAL):
            self._announce_sink_wait()
            if self.stop.is_set():
                return False
        if self.status.state == "waiting":
            self.status.set_state("running")
        return True

    def _announce_sink_wait(self) -> None:
        """Say which sinks the driver waits for, and look whether it should stop or has to."""
        self._quiet_since = self.monotonic()
        self.steps.enter("wait")
        behind = ", ".join(f"{name} ({lag})" for name, lag in self.publisher.lags.items() if lag)
        self.status.set_state(
            "waiting",
            error=self.publisher.trouble,
            why=f"{self.publisher.unpublished_count} epochs are sealed but not in every sink yet:"
            f" {behind}",
        )
        self.steps.require_not_lost()
        # A stop takes effect here. What needs an epoch is collected again before the next one.
        self.inbox.collect()
        self._denied_for = 0.0  # the store has answered

    def _finish(self) -> RunOutcome | None:
        """Wait until every sink has every epoch: after "finished" no driver starts by itself.

        Returns:
            None if another epoch is needed: another process has filled a slot meanwhile, and the
            epoch finds what that leaves to do, or someone asks for what only an epoch can do.
        """
        head = self._head
        while True:
            is_drained = self.publisher.drain(_SINK_POLL_INTERVAL)
            # A merge may have filled a slot since the last epoch, or have the next one.
            requests = self._collect_requests()
            self._follow_head()
            if self._head != head or requests.wants_epoch:
                return None
            merges = self.inbox.held is not None
            if is_drained and not merges:
                return RunOutcome("finished", "every source is bounded and read to its end")
            if not is_drained:
                self._announce_sink_wait()
            if self.stop.is_set():
                what = "every sink had the last epochs of the sources"
                what = "a merge had filled the next slot" if is_drained else what
                return RunOutcome("stopped", f"asked to stop before {what}")

    @property
    def _head(self) -> tuple[int, int]:
        """Timeline and slot of the newest record that this driver has read."""
        head = self.engine.resume_state.head
        return head.timeline, head.slot

    def _record_outcome(self, report: EpochReport, seconds: float) -> None:
        self._backoff, self._denied_for, self._trouble = _FIRST_BACKOFF, 0.0, None
        self.status.record_decision(report.decision, report.held_back)
        if report.manifest is not None:
            self._sealed_epochs += 1
            self.status.record_epoch(report.manifest, seconds)
        if report.rows or report.pending:
            self._quiet_since = self.monotonic()
        if self.status.state != "running":
            self.status.set_state("running")
        self.on_epoch(report, seconds)

    def _pause_between_epochs(self, report: EpochReport, begun: float) -> None:
        checkpoint = self.spec.checkpoint
        rest = checkpoint.min_interval / 1e6 - (self.monotonic() - begun)
        if not report.rows and not report.pending and not report.lost:
            rest = max(rest, checkpoint.idle_interval / 1e6)
        self.steps.enter("wait")
        if rest > 0:
            self.stop.wait(rest)

    def _require_passing(self, error: Exception) -> TidegateError:
        """Return the error if it may pass while this process waits; raise any other error again."""
        if isinstance(error, StoreDeniedError):
            if self._denied_for >= DENIED_PATIENCE:
                raise error
            return error
        if isinstance(error, TransientError):
            return error
        full_disk = detect_full_disk(self.spec.name, error)
        if full_disk is None:
            raise error
        return full_disk

    def _wait_and_reload(self, error: TidegateError) -> None:
        """Report an error that may pass, wait, and read the head of the log again."""
        self._trouble = error
        _log.warning("transient", code=error.code, error=error.message, again_in=self._backoff)
        self.steps.enter("wait")
        why = (
            f"trying again by itself, for {DENIED_PATIENCE / 60:g} minutes"
            if isinstance(error, StoreDeniedError)
            else "trying again by itself"
        )
        self.status.set_state("waiting", error=error, why=why)
        pause = max(self._backoff, error.retry_after or 0.0)
        self.stop.wait(pause)
        if isinstance(error, StoreDeniedError):
            self._denied_for += pause
        self._backoff = min(_LONGEST_BACKOFF, 2 * self._backoff)
        # Silence is counted from 0 again, because no rows could be looked for.
        self._quiet_since = self.monotonic()
        try:
            self._follow_head()
        except (TransientError, StoreDeniedError):
            return  # the next epoch meets the same store and comes back here
        # If the store was away, the document above was not written.
        self.status.write()
