"""One run of a pipeline, from the spec to the exit code.

1. Open the store, check that it keeps its promises, and that it belongs to this pipeline.
2. Wait until the pipeline should run, and take the lease while Spark starts.
3. Select the checkpoint to continue from; `recover_to` other than `latest` is a restore.
4. Run the loop.
5. Drain: publish what is sealed, write why the run ended, release the lease.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

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
from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.driver_requests import read_desired_state
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.pipeline_identity import read_identity
from tidegate.checkpoints.s3_store import list_bucket_hazards
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import PoisonError, TidegateError, TransientError
from tidegate.jobs.engine.epoch_engine import (
    Engine,
    EngineRuntime,
    EpochPorts,
    EpochReport,
)
from tidegate.jobs.engine.interfaces import (
    Mover,
    RowDispatcher,
    RowWork,
    Sink,
    WorkingMover,
    WorkRunner,
    read_faults_from_environment,
    run_work_here,
)
from tidegate.jobs.engine.manifest_writer import ManifestAuthor
from tidegate.jobs.engine.publisher import Publisher
from tidegate.jobs.sinks.factory import make_sinks
from tidegate.jobs.sinks.output_tables import DriverTables
from tidegate.jobs.sources.factory import PipelineSources
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.topic_checks import require_readable_topics
from tidegate.jobs.spec.pipeline import PipelineSpec

from .deploy_turn import DeployTurn
from .epoch_listeners import EpochListeners
from .epoch_loop import EndConditions, EpochLoop, RunOutcome
from .error_classification import classify_error
from .errors import STORE_WIPED
from .operator_requests import RequestInbox
from .spec_checks import SqlField, judge_with_spark, require_no_mistakes
from .startup import (
    ALIVE_FILE,
    ENDED_BEFORE_LEASE,
    LaunchOptions,
    LeaderElection,
    LeasedSession,
    explain_by_damage,
    judge_failure,
    open_work_folder,
    select_start_checkpoint,
    touch_alive_file,
)
from .status_reporter import FreshnessMeter

_log = structlog.get_logger("tidegate.driver")

_START_PATIENCE = 600.0  # seconds; then exit as transient and let the supervisor decide
_MALLOC_ARENA_MAX = -8  # of malloc.h
_MALLOC_ARENAS = 2
# Seconds to publish what is sealed. What is not published by then is left to the next driver.
_DRAIN_SECONDS = 60.0


@dataclass(frozen=True)
class RunOptions(LaunchOptions):
    """How to run a pipeline.

    Attributes:
        until: what ends the run without a request.
        work: scratch folder; a temporary one unless given.
        on_epoch: called after each epoch, sealed or not, with its report and its seconds.
        ends_input: the sources end after the objects that they hold now, as if each were bounded.
    """

    until: EndConditions = field(default_factory=EndConditions)
    work: Path | None = None
    on_epoch: Callable[[EpochReport, float], None] = lambda _report, _seconds: None
    ends_input: bool = False


@dataclass(frozen=True)
class RunContext:
    """What a run has before it holds the lease.

    Attributes:
        store: the store with the pipeline's log.
        work: scratch folder.
        stop: set when the process should end.
        retry: calls a function until the store answers, at most ten minutes.
    """

    spec: PipelineSpec
    options: RunOptions
    store: Store
    work: Path
    stop: threading.Event
    retry: Retrying


def run_pipeline(spec: PipelineSpec, options: RunOptions) -> int:
    """Run one pipeline in this process until it ends, and return the exit code.

    0 if it was stopped or is finished. Errors are logged and turned into the exit code of their
    class; they are in the status if the run held the lease. Signals: see `run_until_end`.
    """
    return run_to_exit_code(spec.name, lambda: run_until_end(spec, options))


def run_to_exit_code(name: str, run: Callable[[], object]) -> int:
    """Call a run of a pipeline or job, log the error that ends it, and return its exit code."""
    try:
        run()
    except TidegateError as error:
        return _log_end(name, error)
    return 0


@contextlib.contextmanager
def exit_on_error(name: str) -> Iterator[None]:
    """Log an error of the block, and end the process with its class's exit code."""
    try:
        yield
    except TidegateError as error:
        sys.exit(_log_end(name, error))


def _log_end(name: str, error: TidegateError) -> int:
    _log.error("ended", **{**error.as_dict(), "pipeline": name})
    return error.failure_class.exit_code


@contextlib.contextmanager
def open_run(
    name: str, store_url: str, deploy: DeployTurn | None = None
) -> Iterator[tuple[Store, threading.Event, Retrying]]:
    """Yield the store, the event that signals set, and the retry of a run of a pipeline or job.

    An error of the block leaves it as `classify_error` gives it, or says that a deploy has failed.
    """
    limit_memory_arenas()
    stop = threading.Event()
    try:
        with stop_on_signals(stop):
            retry = make_startup_retry(name, stop)
            with (
                contextlib.closing(retry(open_store, store_url)) as store,
                _judge_deploy(deploy, store, name),
            ):
                yield store, stop, retry
    except Exception as error:
        reported = classify_error(name, error)
        # As it is, so that its traceback does not name a second exception.
        if reported is error:
            raise
        raise reported from error


@contextlib.contextmanager
def _judge_deploy(deploy: DeployTurn | None, store: Store, name: str) -> Iterator[None]:
    """Have an error of the block end the deploy that is tried."""
    try:
        yield
    except Exception as error:
        known = classify_error(name, error)
        reported = judge_failure(deploy, store, known)
        if reported is known:
            raise
        raise reported from error


def limit_memory_arenas() -> None:
    """Let this process have two arenas of `malloc`, unless MALLOC_ARENA_MAX says otherwise.

    Every epoch starts threads. By default glibc gives them up to eight arenas for each core, and
    the free pieces in each of them grow with the epochs.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        # Other C libraries have no `mallopt`, or none that knows this option.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_MALLOC_ARENA_MAX, _MALLOC_ARENAS)


def run_until_end(spec: PipelineSpec, options: RunOptions) -> RunOutcome:
    """Run one pipeline in this process, and return how it ended.

    In the main thread, SIGTERM and the first SIGINT drain, seal and stop; a second SIGINT raises
    KeyboardInterrupt at once. In another thread no handler is installed.

    Raises:
        TidegateError: what ended the run; it is in the status if the run held the lease.
    """
    with (
        open_run(spec.name, options.store_url, options.deploy) as (store, stop, retry),
        open_work_folder(options.work) as work,
    ):
        outcome = _run_when_wanted(RunContext(spec, options, store, work, stop, retry))
    _log.info("ended", pipeline=spec.name, state=outcome.state, why=outcome.why)
    return outcome


def _run_when_wanted(run: RunContext) -> RunOutcome:
    spec, options = run.spec, run.options
    alive = run.work / ALIVE_FILE
    election = LeaderElection(run.store, spec.name, run.stop, run.retry, options, alive)
    unjudged = require_no_mistakes(spec)
    require_readable_topics(spec, os.environ)
    # Before Spark starts: a stopped pipeline costs one request now and then, and no memory.
    if not election.wait_until_wanted():
        return ENDED_BEFORE_LEASE
    with (
        contextlib.closing(InputView(run.store, spec, run.work)) as view,
        _start_mover(run, view, unjudged) as wait_for_mover,
    ):

        def warm_up() -> None:
            """Look for rules of the bucket, and let Spark start where it is needed at once."""
            for hazard in list_bucket_hazards(run.store, BucketLayout(spec.name).pipeline_prefix):
                _log.warning("bucket_rule", pipeline=spec.name, what=hazard)
            if options.standby or unjudged:
                wait_for_mover()

        return election.run_session(
            warm_up, lambda uid, lease: DriverSession(run, view, wait_for_mover, uid, lease)
        )


@contextlib.contextmanager
def _start_mover(
    run: RunContext, view: InputView, unjudged: list[SqlField]
) -> Iterator[Callable[[], Mover]]:
    """Start Spark in another thread; the function that is yielded waits for the mover.

    It raises ConfigurationError if Spark refuses one of the expressions in `unjudged`.
    """

    def start() -> Mover:
        """Run in the other thread."""
        # Spark is imported here and nowhere above: the lease must not wait for a JVM.
        from tidegate.jobs.spark.mover import SparkMover

        with contextlib.ExitStack() as on_error:
            mover = SparkMover(view, run.spec, run.work)
            on_error.callback(mover.close)
            if unjudged:
                judge_with_spark(mover.session, run.spec, unjudged)
            on_error.pop_all()
        return mover

    with ThreadPoolExecutor(1, thread_name_prefix="spark-start") as pool:
        starting = pool.submit(start)
        try:
            yield starting.result
        finally:
            if not starting.cancel() and starting.exception() is None:
                starting.result().close()


def make_startup_retry(pipeline: str, stop: threading.Event) -> Retrying:
    """Return a retry for the time before the lease, when there is no status to write to.

    It tries again after a `TransientError`, for at most ten minutes, and logs each attempt. Then it
    raises the last error; so it does when `stop` is set.
    """

    def log_store_away(state: RetryCallState) -> None:
        """Log a failed attempt and when the next one comes."""
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


class DriverSession(LeasedSession):
    """A pipeline while its lease is held; its tables are published from `run_to_end` on."""

    _listeners: EpochListeners

    def __init__(
        self,
        run: RunContext,
        view: InputView,
        wait_for_mover: Callable[[], Mover],
        uid: str,
        lease: Lease,
    ) -> None:
        spec, store = run.spec, run.store
        self._context, self._wait_for_mover, self._uid = run, wait_for_mover, uid
        self._spark_ui: str | None = None
        self._loop: EpochLoop | None = None
        self._sources = PipelineSources(spec, view, ends_input=run.options.ends_input)
        super().__init__(spec, store, lease, spec.digest(), run.options.deploy, self._run_work)
        self._faults = read_faults_from_environment()
        self._publisher = Publisher(
            make_followers(spec, store, uid, self._run_work),
            self._slot_log,
            self._faults,
            group=spec.outputs.publish_every,
        )
        self._listeners = EpochListeners(spec, store, self._status.snapshot, run.options.on_epoch)
        self._freshness = FreshnessMeter(
            spec.supervision.freshness, lambda: self._publisher.unpublished_count
        )

    def _classify(self, error: Exception) -> TidegateError:
        # If the store has forgotten the pipeline, only this driver still knows what it had. Its own
        # error, for example a file that is not found, would not say so.
        name = self._context.spec.name
        with contextlib.suppress(TidegateError):
            if read_identity(self._context.store, name) != self._uid:
                facts = self._status.snapshot()
                counts = facts.get("counters") or {}
                return STORE_WIPED(
                    pipeline=name,
                    checkpoint=facts.get("checkpoint") or "no checkpoint",
                    read=counts.get("read", 0),
                    released=counts.get("released", 0),
                )
        return classify_error(name, error)

    def _run(self) -> RunOutcome:
        run, retry = self._context, self._context.retry
        retry(
            select_start_checkpoint,
            run.spec,
            self._slot_log,
            self._steps.lease,
            run.options.recover_to,
        )
        # Only now: a restore may have moved the head, and sinks follow the new timeline at once.
        head = retry(self._slot_log.head)
        self._publisher.start(head.timeline, head.slot)
        mover = self._wait_for_mover()
        # The address of Spark's own pages, if Spark was needed.
        if run.spec.spark.conf.get("spark.ui.enabled") == "true":
            from pyspark import SparkContext

            context = SparkContext._active_spark_context
            self._spark_ui = context.uiWebUrl if context else None
        # Not in the first plan: its limit is for other work, and the status says what takes long.
        self._steps.enter("load")
        retry(self._sources.open_logs)
        self._loop = loop = retry(self._make_loop, mover)
        try:
            outcome = loop.run()
        except Exception as error:
            passes = isinstance(error, TidegateError) and not isinstance(error, PoisonError)
            damage = None if passes else explain_by_damage(run.spec, self._slot_log)
            if damage is None:
                raise
            raise damage from error
        self._status.set_state("draining", why=outcome.why)
        self._steps.enter("publish")
        if not self._publisher.drain(_DRAIN_SECONDS):
            _log.warning(
                "not_published",
                pipeline=run.spec.name,
                epochs=self._publisher.lags,
                advice="the next driver publishes them",
            )
        return outcome

    def _run_work(self, work: RowWork) -> Any:
        """Do work on rows of sealed epochs where the mover moves rows; wait until it has started.

        The threads of sinks and housekeeping call it.
        """
        mover = self._wait_for_mover()
        if isinstance(mover, WorkingMover):
            return mover.run_work(work)
        return run_work_here(self._context.store, work)

    def _collect_live_facts(self) -> dict[str, object]:
        """Return the state of sinks and sources, and touch the file of the liveness probe.

        The status thread calls this. `trouble` is what this driver goes on in spite of.
        """
        if not self._steps.is_overdue:
            touch_alive_file(self._context.work / ALIVE_FILE)
        # Between two tries of an epoch the state is "running", without its error.
        trouble = (
            (self._loop.trouble if self._loop else None) or self._publisher.trouble or self._trouble
        )
        return {
            "unpublished": self._publisher.unpublished_count,
            "sinks": self._publisher.lags,
            "published_in": self._publisher.publish_seconds,
            "trouble": trouble.as_dict() if trouble else None,
            **({"spark_ui": self._spark_ui} if self._spark_ui else {}),
            **self._freshness.read_facts(),
            **self._sources.collect_status(),
        }

    def _note_epoch(self, report: EpochReport, seconds: float) -> None:
        if report.manifest is not None:
            self._freshness.note_sealed(report.manifest)
        self._listeners.on_epoch(report, seconds)
        if self._deploy is not None:
            self._deploy.confirm(self._context.store)

    def _make_loop(self, mover: Mover) -> EpochLoop:
        run, spec, lease = self._context, self._context.spec, self._steps.lease
        engine = Engine(
            spec,
            self._slot_log,
            EpochPorts(
                self._sources.all,
                mover,
                DriverTables(run.store).write,
                make_dispatcher(spec, run.store, self._slot_log, mover),
                self._sources.map_side_by_side,
            ),
            EngineRuntime(
                ManifestAuthor(self._uid, lease.holder.driver, __version__),
                self._steps,
                SYSTEM_CLOCK,
                self._faults,
                read_desired_state(run.store, spec.name).run,
            ),
        )
        inbox = RequestInbox(
            run.store,
            spec,
            lambda: lease.token,
            run.stop,
            lambda: engine.resume_state.head.record,
        )
        return EpochLoop(
            engine,
            self._publisher,
            run.options.until,
            spec,
            self._steps,
            self._status,
            inbox,
            run.stop,
            self._faults,
            self._note_epoch,
        )

    def close(self) -> None:
        """Stop the threads and release the lease."""
        # First what writes tables, then what only reads or reports, and then the lease: the next
        # driver must not meet a thread of this one.
        self._publisher.stop()
        self._sources.close()
        super().close()


@contextlib.contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Let SIGTERM and SIGINT set `stop`; a SIGINT after that raises KeyboardInterrupt at once.

    Only in the main thread; another thread gets no handlers. The old handlers come back at the end.
    """
    # Python lets only the main thread install handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_stop(number: int, _frame: object) -> None:
        """Handle a signal."""
        # Only SIGINT: a supervisor may repeat SIGTERM, which must not cut the drain short.
        if number == signal.SIGINT and stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    stops = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, request_stop) for number in stops}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# What a spec with streams adds to the driver: a dispatcher, and a follower for splice requests.


def make_dispatcher(
    spec: PipelineSpec, store: Store, log: SlotLog, mover: Mover, after: Manifest | None = None
) -> RowDispatcher | None:
    """Return the dispatcher of the spec's streams; None if the spec has no streams.

    `mover` moves the rows, if it can. The dispatcher continues from the epoch `after`, by
    default from the newest one.

    Raises:
        ConfigurationError: a reducer's function or a pipe's predicate is missing or cannot be read.
    """
    if not spec.streams:
        return None
    from tidegate.jobs.sinks.published_tables import read_positions
    from tidegate.jobs.streams.dispatcher import (
        DispatchingMover,
        StreamDispatcher,
        make_local_runner,
    )
    from tidegate.jobs.streams.row_history import LogHistory

    history = LogHistory(log, spec.event_time_column, after, partial(read_positions, spec, store))
    here = make_local_runner(store, history)
    # Functions of reducers are looked for before their modules are sent to tasks.
    dispatcher = StreamDispatcher(spec, here)
    if isinstance(mover, DispatchingMover):
        dispatcher.run = mover.make_dispatch_runner(store, history, here)
    return dispatcher


def make_followers(
    spec: PipelineSpec, store: Store, uid: str, run: WorkRunner | None = None
) -> list[Sink]:
    """Return all followers of the log: the tables, the sinks, and the writer of splice requests.

    The last one only if an attachment has ``merge: splice``. `run` is as in `make_sinks`.
    """
    sinks = make_sinks(spec, store, uid, run)
    if any(one.merge == "splice" for one in spec.stream_graph.attachments.values()):
        from tidegate.jobs.streams.stream_state import SpliceRequestSink

        sinks.append(SpliceRequestSink())
    return sinks
