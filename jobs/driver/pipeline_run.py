"""One run of a pipeline, from spec to exit code.

1. Open the store, make sure that it keeps its promises, and that it is this pipeline's.
2. Take the lease while Spark starts, or stand by for it: while another drives, and while people
  want that nobody does.
3. Stand at the newest checkpoint; `recover_to` other than `latest` is a restore.
4. Run the loop.
5. Drain: publish what is sealed, say how it ended, give the lease back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    stop_when_event_set,
    wait_exponential_jitter,
)
from tenacity.nap import sleep_using_event

from tidegate import __version__
from tidegate.checkpoints.desired_state import DesiredState, set_desired_state
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.lease_renewal import LeaseRenewer
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store, require_honest_store
from tidegate.errors import TidegateError, TransientError
from tidegate.jobs.driver.epoch_listeners import EpochListeners
from tidegate.jobs.driver.epoch_loop import EndConditions, EpochLoop, RunOutcome
from tidegate.jobs.driver.error_classification import classify_error
from tidegate.jobs.driver.housekeeping import Housekeeper
from tidegate.jobs.driver.leader_election import ALIVE_FILE, LeaderElection, touch_alive_file
from tidegate.jobs.driver.operator_requests import RequestInbox
from tidegate.jobs.driver.startup_recovery import select_start_checkpoint
from tidegate.jobs.driver.status_reporter import DriverSteps, StatusReporter
from tidegate.jobs.engine.epoch_engine import Engine, EpochReport, ManifestAuthor
from tidegate.jobs.engine.fault_points import read_faults_from_environment
from tidegate.jobs.engine.interfaces import Mover, RowDispatcher, Sink
from tidegate.jobs.engine.publisher import PublisherGroup
from tidegate.jobs.sinks.factory import make_sinks
from tidegate.jobs.sinks.output_tables import DriverTables
from tidegate.jobs.sources.factory import PipelineSources
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.spec.pipeline import PipelineSpec

_log = structlog.get_logger("tidegate.driver")

_START_PATIENCE = 600.0  # seconds; then exit as transient and let the supervisor decide
_ENDED_BEFORE_LEASE = RunOutcome(
    "stopped", "a signal asked for it, before it was this one's turn to drive"
)
_DRAIN_SECONDS = (
    60.0  # publishing what is sealed already; the log keeps the rest for the next driver
)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run, as opposed to what (the spec).

    Attributes:
        store_url: ``s3://bucket/prefix`` or a folder.
        until: what ends the run by itself.
        recover_to: ``latest``, ``latest_healthy`` or a checkpoint id; anything but ``latest`` is a
            restore.
        standby: wait until the lease is free, with Spark warm, and until the pipeline should run.
        asked_by: a person who wants by this very run that the pipeline runs, even if it was stopped
            before.
        work: scratch folder; a temporary one unless given.
        on_epoch: called after each epoch, for progress.
    """

    store_url: str
    until: EndConditions = field(default_factory=EndConditions)
    recover_to: str = "latest"
    standby: bool = False
    asked_by: str | None = None
    work: Path | None = None
    on_epoch: Callable[[EpochReport, float], None] = lambda _report, _seconds: None


def run_pipeline(spec: PipelineSpec, options: RunOptions) -> int:
    """Run one pipeline in this process until it ends; returns the exit code.

    Errors are written to the status, logged, and turned into the exit code of their class. Installs
    handlers for SIGTERM and SIGINT when called from the main thread: drain, seal, stop.
    """
    stop = threading.Event()
    try:
        with _stop_on_signals(stop), _open_work_folder(options.work) as work:
            ended = _run_when_wanted(spec, options, work, stop)
    except Exception as error:
        known = classify_error(spec.name, error)
        _log.error("ended", **{**known.as_dict(), "pipeline": spec.name})
        return known.failure_class.exit_code
    _log.info("ended", pipeline=spec.name, state=ended.state, why=ended.why)
    return 0


def _run_when_wanted(
    spec: PipelineSpec, options: RunOptions, work: Path, stop: threading.Event
) -> RunOutcome:
    patiently = _make_startup_retry(spec.name, stop)
    store = patiently(open_store, options.store_url)
    with contextlib.closing(store):
        turn = LeaderElection(
            store, spec.name, stop, patiently, standby=options.standby, alive=work / ALIVE_FILE
        )
        if options.asked_by is not None:
            turn.clear_stop(options.asked_by)
        return (
            _drive_with_lease(spec, options, store, turn, work)
            if turn.wait_until_wanted()
            else _ENDED_BEFORE_LEASE
        )


def _drive_with_lease(
    spec: PipelineSpec, options: RunOptions, store: Store, turn: LeaderElection, work: Path
) -> RunOutcome:
    patiently, view = turn.patiently, InputView(store, spec, work)
    with ThreadPoolExecutor(1, thread_name_prefix="spark-start") as pool:
        warm = pool.submit(_start_mover, view, spec, work)
        try:
            patiently(require_honest_store, store)
            uid = patiently(ensure_identity, store, spec.name)
            if options.standby:
                warm.result()
                _log.info("standing_by", pipeline=spec.name)
            lease = turn.acquire_lease(uid)
            if lease is None:
                return _ENDED_BEFORE_LEASE
            with contextlib.closing(
                _DriverSession(spec, store, view, uid, lease, work, turn.stop, options)
            ) as run:
                return run.run_to_end(warm.result, patiently)
        finally:
            if not warm.cancel() and warm.exception() is None:
                warm.result().close()
            view.close()


def _make_startup_retry(pipeline: str, stop: threading.Event) -> Retrying:
    """A store that is away when the driver starts is waited for, audibly.

    There is no status to write it to.
    """

    def log_store_away(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        wait = state.next_action.sleep if state.next_action else 0.0
        _log.warning("store_away", pipeline=pipeline, error=str(error), again_in=round(wait, 1))

    return Retrying(
        retry=retry_if_exception_type(TransientError),
        wait=wait_exponential_jitter(multiplier=1.0, max=15.0),
        stop=stop_after_delay(_START_PATIENCE) | stop_when_event_set(stop),
        sleep=sleep_using_event(stop),
        before_sleep=log_store_away,
        reraise=True,
    )


def _start_mover(store: Store, spec: PipelineSpec, work: Path) -> Mover:
    # Spark is imported here and nowhere above: the lease must not wait for a JVM.
    from tidegate.jobs.spark.mover import SparkMover

    return SparkMover(store, spec, work)


class _DriverSession:
    """What lives while the lease is held."""

    def __init__(
        self,
        spec: PipelineSpec,
        store: Store,
        view: InputView,
        uid: str,
        lease: Lease,
        work: Path,
        stop: threading.Event,
        options: RunOptions,
    ) -> None:
        self.spec, self.store, self.uid, self.lease, self.stop, self.options = (
            spec,
            store,
            uid,
            lease,
            stop,
            options,
        )
        self.alive = work / ALIVE_FILE
        self.sources = PipelineSources(spec, store, view)
        self.log = SlotLog(store, spec.name)
        self.keeper = LeaseRenewer(lease).start()
        self.steps = DriverSteps(self.keeper)
        self.faults = read_faults_from_environment()
        self.housekeeper = Housekeeper(spec, self.log).start()
        self.publisher = PublisherGroup(
            make_followers(spec, store, uid, work),
            self.log,
            self.faults,
            group=spec.outputs.publish_every,
        )
        facts = {
            "pipeline": spec.name,
            "pid": os.getpid(),
            "code_version": __version__,
            "spec_digest": spec.digest(),
        }
        self.status = StatusReporter(
            store, lease, self.steps, facts, silent_after=spec.supervision.silent_after
        )
        self.observers = EpochListeners(spec, store, self.status.snapshot, options.on_epoch)

    def run_to_end(self, mover: Callable[[], Mover], patiently: Retrying) -> RunOutcome:
        """Settle the head, run the loop, drain; the status says how it ended."""
        self.status.start(self._collect_live_facts)
        try:
            patiently(
                select_start_checkpoint, self.spec, self.log, self.lease, self.options.recover_to
            )
            self.publisher.start(patiently(self.log.head).slot)
            ended = patiently(self._make_loop, mover()).run()
            self.status.set_state("draining", why=ended.why)
            self.steps.enter("publish")
            self.publisher.drain(_DRAIN_SECONDS)
            if (
                self.options.standby and ended.state == "finished"
            ):  # or the next one would begin, and finish, for ever
                set_desired_state(
                    self.store, self.spec.name, DesiredState.STOPPED, who="driver", why=ended.why
                )
        except Exception as error:
            known = classify_error(self.spec.name, error)
            self.status.set_state("failed", error=known)
            self.observers.on_failure(known)
            raise known from error
        self.status.set_state(ended.state, why=ended.why)
        return ended

    def _collect_live_facts(self) -> dict[str, object]:
        """How the sinks and sources are, for the status."""
        if not self.keeper.is_overdue:
            touch_alive_file(self.alive)
        publisher = self.publisher
        sinks = {
            "unpublished": publisher.unpublished_count,
            "sinks": publisher.lags,
            "published_in": publisher.publish_seconds,
        }
        return {
            **sinks,
            "trouble": _describe_error(publisher.trouble),
            **self.sources.collect_status(),
        }

    def _make_loop(self, mover: Mover) -> EpochLoop:
        engine = Engine(
            self.spec,
            self.log,
            self.sources.all,
            mover,
            author=ManifestAuthor(self.uid, self.lease.holder.driver, __version__),
            steps=self.steps,
            clock=SYSTEM_CLOCK,
            faults=self.faults,
            small_tables=DriverTables(self.store).write,
            dispatch=make_dispatcher(self.spec, self.store, self.log, mover),
        )
        inbox = RequestInbox(
            self.store,
            self.spec.name,
            lambda: self.lease.token,
            self.stop,
            lambda: engine.standing.head.record,
            attachments=self.spec.stream_graph.attachments,
        )
        return EpochLoop(
            self.spec,
            engine,
            self.publisher,
            self.keeper,
            self.steps,
            self.status,
            inbox,
            self.faults,
            self.stop,
            self.options.until,
            self.observers.on_epoch,
        )

    def close(self) -> None:
        """Stop the threads and give the lease back, so that the next driver need not wait."""
        self.publisher.stop()
        self.housekeeper.stop()
        self.sources.close()
        self.status.stop()
        self.keeper.stop()
        with contextlib.suppress(TransientError):
            self.lease.release()
        # Last: a collector that does not answer must not keep the next driver waiting.
        self.observers.close()


def _describe_error(error: TidegateError | None) -> dict[str, object] | None:
    return error.as_dict() if error else None


@contextlib.contextmanager
def _stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT ask for a drain; a second SIGINT ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_stop(number: int, _frame: object) -> None:
        if number == signal.SIGINT and stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {
        number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _open_work_folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with TemporaryDirectory(prefix="tidegate-") as folder:
        yield Path(folder)


# What a pipeline's streams add to its driver: who dispatches, and who writes the documents of
# splice requests.


def make_dispatcher(
    spec: PipelineSpec, store: Store, log: SlotLog, mover: Mover, after: Manifest | None = None
) -> RowDispatcher | None:
    """Who sends rows to the spec's streams, after an epoch (default.

    The newest); None when it has none.

    Raises:
        ConfigurationError: a reducer's function or a pipe's predicate is not there or cannot be
            read.
    """
    if not spec.streams:
        return None
    from tidegate.jobs.streams.dispatcher import StreamDispatcher
    from tidegate.jobs.streams.reducers import FoldingMover, fold_batch
    from tidegate.jobs.streams.row_history import LogHistory

    run = mover.fold_runner() if isinstance(mover, FoldingMover) else fold_batch
    return StreamDispatcher(
        spec, store, LogHistory(log, next(iter(spec.sources.values())).event_time, after), run
    )


def make_followers(spec: PipelineSpec, store: Store, uid: str, work: Path) -> list[Sink]:
    """Everything that follows the log: the sinks, and the documents of splice requests."""
    sinks = make_sinks(spec, store, uid, work)
    if any(one.merge == "splice" for one in spec.stream_graph.attachments.values()):
        from tidegate.jobs.streams.splice_request_sink import SpliceRequestSink

        sinks.append(SpliceRequestSink())
    return sinks
