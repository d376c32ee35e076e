"""The thread that seals batches while the script runs, and watches the queries and the lease."""

import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import structlog

from tidegate.checkpoints.batch_notes import BatchReport
from tidegate.checkpoints.driver_requests import AckOutcome, DriverRequest, RequestQueue
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.store import StoreDeniedError
from tidegate.errors import ErrorDefinition, TidegateError, TransientError
from tidegate.jobs.driver.epoch_loop import DENIED_PATIENCE
from tidegate.jobs.driver.error_classification import classify_error
from tidegate.jobs.driver.operator_requests import ENDING_KINDS, PINNING_KINDS, pin_for_request
from tidegate.jobs.driver.status_reporter import STEP_DEADLINES, DriverSteps, StatusReporter
from tidegate.jobs.spark.spark_session import extract_cause

from .batch_sealer import BatchSealer, SealedQuery, read_progress
from .checkpoint_files import (
    count_state_partitions,
    find_planned_batch,
    find_running_batch,
    list_committed_batches,
)
from .errors import (
    BATCH_STALLED,
    BUCKET_AWAY,
    QUERY_ENDED,
    SCRIPT_FAILED,
    SINK_RACED,
    SLOT_TAKEN,
    WORKER_LATE,
)
from .sink_restore import find_newest_entry

_LOOK_EVERY = 0.2  # seconds
_REQUESTS_EVERY = 1.0  # seconds; each look costs a LIST
# Seconds for which a committed batch waits for Spark's report of it, which comes a little later.
_REPORT_PATIENCE = 3.0
_MOST_REPORTS = 1000
_FEW_PARTITIONS = 32  # of a state, whose files cost no time that anyone notices
_LOST_RACE = "Race while writing batch"  # Spark's file sink, about its log
# How Hadoop's S3A says that no server has answered, after retries of its own for about a minute.
# A lost connection keeps Java's class, with the text of the SDK (hadoop-aws 3.4.2).
_BUCKET_AWAY = re.compile(
    r"fs\.s3a\.AWS(?:ApiCallTimeout|ClientIO|NoResponse|ServiceIO|ServiceThrottled|Status500)Exc"
    r"|fs\.s3a\.HttpChannelEOFException"
    r"|awssdk\.\S+: Unable to execute HTTP request"
)
# Spark 4.1.3 gives a worker of a stateful function 10 s; no setting changes that.
_WORKER_LATE = "Timed out while waiting for the Python worker"
# Errors that would pass by themselves, but not in this launch.
_ENDING = (SLOT_TAKEN.code, BATCH_STALLED.code, SINK_RACED.code)
_TRIGGERS_THAT_END = ("availableNow", "once")
_RETRY_AFTER = 2.0  # seconds, when the store does not answer
_WATERMARK_POLICY = "spark.sql.streaming.multipleWatermarkPolicy"  # min unless set to max

_Watermark = tuple[Any, str]  # a node of a plan, and the sources below it
_log = structlog.get_logger("tidegate.job")


class SparkReports:
    """What Spark reports, by run and batch; a listener for `StreamingQueryManager.addListener`.

    It implements Spark's Java interface. PySpark's own class reads every field of a report by calls
    into the JVM, with RocksDB some hundreds per batch, before a listener sees it; this one reads
    the JSON. Written for PySpark 4.1.3, which asks a listener for `_jlistener`, and calls it in
    threads of Spark.

    Attributes:
        latest: query -> its newest report, as JSON.
        failures: query -> the error that ended it.
        ends: the queries that have ended without an error.
        ended: number of batches that have ended, of all queries.
        arrived: set by each report about a batch or the end of a query.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # run id -> query
        self._batches: dict[tuple[str, int], dict[str, Any]] = {}
        self.latest: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.ends: set[str] = set()
        self._turns: Counter[str] = Counter()
        self.ended = 0
        self.arrived = threading.Event()

    def list_started(self) -> list[str]:
        """Return the names of the queries that have started; empty for a query without a name."""
        return list(self._names.values())

    def count_turns(self, query: str) -> int:
        """Count how often a trigger of a query has ended, with a batch or with nothing to do."""
        return self._turns[query]

    def find(self, query: str, batch: int) -> BatchReport | None:
        """Return the report of a batch; None if it has not come, or was forgotten."""
        report = self._batches.get((query, batch))
        return None if report is None else read_progress(report)

    def forget(self, query: str, batch: int) -> None:
        """Forget the report of a batch, once it is sealed."""
        self._batches.pop((query, batch), None)

    @property
    def _jlistener(self) -> Any:
        from pyspark import SparkContext

        jvm: Any = SparkContext._jvm
        return jvm.PythonStreamingQueryListenerWrapper(self)

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's names
        """Note the start."""
        self._names[event.runId().toString()] = event.name() or ""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """Note the report of a batch."""
        report = json.loads(event.progress().json())
        name = report.get("name") or ""
        self._batches[name, int(report["batchId"])] = self.latest[name] = report
        while len(self._batches) > _MOST_REPORTS:  # of queries that are not sealed
            self._batches.pop(next(iter(self._batches)))
        self.ended += 1
        self._turns[name] += 1
        self.arrived.set()

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Note that a trigger has found nothing to do."""
        self._turns[self._names.get(event.runId().toString(), "")] += 1

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """Note the end, with or without an error."""
        run, error = event.runId().toString(), event.exception()
        name = self._names.get(run, run)
        if error.isDefined():
            self.failures[name] = error.get()
        else:
            self.ends.add(name)
        self.arrived.set()

    class Java:
        """Read by Py4J."""

        implements: ClassVar = ["org.apache.spark.sql.streaming.PythonStreamingQueryListener"]


class _Work(NamedTuple):
    """What a query is doing, as far as Spark shows it."""

    batch: int | None  # the planned one
    turns: int  # triggers that have ended


@dataclass(eq=False, repr=False)
class SealLoop:
    """Seals what Spark has committed, batch by batch, until `close`.

    Its thread also answers requests: it applies stop, drain, pin and savepoint, and refuses others.

    Args:
        sealer: fills the slots.
        reports: of Spark.
        steps: the lease, and the deadline of a batch.
        status: says when the store is away.
        stop: set when the job should end; also set here on a request or an error.
        on_idle: called while no batch runs.
        may_end: a query without an end of its own may end before the job.
        batch_within: seconds that a query may take from the start of its trigger to the end of a
            batch, or to the answer that there is nothing to do.

    Attributes:
        error: what ended the job; None while nothing has.
        queries: the queries that the script has started.
        raced: those whose sink another process has written into.
    """

    _sealer: BatchSealer
    _reports: SparkReports
    _steps: DriverSteps
    _status: StatusReporter
    _stop: threading.Event
    _on_idle: Callable[[], None] = lambda: None
    may_end: bool = False
    batch_within: float = STEP_DEADLINES["move"]

    def __post_init__(self) -> None:
        self._slot_log = self._sealer.log
        self._requests = RequestQueue(self._slot_log.store, self._slot_log.pipeline)
        self._requests_read_at = 0.0
        # query -> what it was doing, and since when this loop has seen it so
        self._doing: dict[str, tuple[_Work, float]] = {}
        self.queries: dict[str, SealedQuery] = {}
        self.raced: set[str] = set()
        self.error: TidegateError | None = None
        self._denied_since: float | None = None  # the store refuses the keys
        self._closing = threading.Event()
        self._looked_at = 0.0  # for batches that no report has announced
        self._committed_at: dict[tuple[str, int], float] = {}  # as this loop has seen it
        self._advised: set[str] = set()  # queries
        self._thread = threading.Thread(target=self._run, name="tidegate-seal", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Seal what is committed, unless the job has failed here, and end the thread.

        It waits at most 120 s for that. What the thread meets is in `error`, and not raised.
        """
        self._closing.set()
        self._reports.arrived.set()
        self._thread.join(timeout=120.0)

    def seal_committed(self, *, patience: float = _REPORT_PATIENCE) -> int:
        """Seal the committed batches of each query in order, and return how many it sealed.

        A query ends at a batch that still waits for its report. Raises as `BatchSealer.seal` does.

        Args:
            patience: seconds after its commit for which a batch waits for Spark's report of it.
        """
        sealed = 0
        for query in list(self.queries.values()):
            for batch in list_committed_batches(query.folder):
                if batch <= query.sealed:
                    continue
                report = self._reports.find(query.name, batch)
                seen_at = self._committed_at.setdefault((query.name, batch), time.monotonic())
                if report is None and time.monotonic() - seen_at < patience:
                    break
                self._steps.enter("seal")
                self._require_own_sink(query, batch)
                holder = find_watermark_holder(query.facts.query)
                report = (report or BatchReport()).model_copy(update={"holder": holder})
                sealed += self._sealer.seal(query, batch, report)
                self._reports.forget(query.name, batch)
                self._committed_at.pop((query.name, batch))
                self._steps.enter("wait")
                self._advise_partitions(query)
        return sealed

    def _require_own_sink(self, query: SealedQuery, batch: int) -> None:
        """Make sure that the log of a file sink has this batch, and none that is not planned here.

        A driver that was taken over may still write into it. Spark leaves out the rows of batches
        whose numbers the log has already, and such a batch must not be sealed.

        Raises:
            TransientError: another process has written into the sink.
        """
        # The log first: Spark plans a batch before it writes it.
        written = find_newest_entry(query.sink_log)
        planned = find_planned_batch(query.folder) or batch
        # None: another sink, or a log that Hadoop's own settings put elsewhere.
        if written is None or batch <= written <= planned:
            return
        self.raced.add(query.name)
        text = f"its log ends with batch {written}, which is not planned here"
        raise SINK_RACED(pipeline=self._slot_log.pipeline, query=query.name, text=text)

    def _advise_partitions(self, query: SealedQuery) -> None:
        """Log once per query if its state has far more partitions than the host has cores."""
        if query.name in self._advised:
            return
        self._advised.add(query.name)
        partitions, cores = count_state_partitions(query.folder), os.cpu_count() or 1
        if partitions > max(_FEW_PARTITIONS, 4 * cores):
            # A checkpoint keeps its number of partitions, so the setting alone changes nothing.
            advice = f"set spark.sql.shuffle.partitions to {cores} and begin with a new checkpoint"
            _log.warning(
                "many_state_partitions", query=query.name, partitions=partitions, advice=advice
            )

    def _run(self) -> None:
        while not self._closing.is_set():
            reported = self._reports.arrived.wait(_LOOK_EVERY)
            self._reports.arrived.clear()
            self._guard(partial(self._run_once, reported))
        while self.error is None and self._guard(self._seal_rest):
            pass

    def _run_once(self, reported: bool) -> bool:
        self._steps.require_not_lost()
        now = time.monotonic()
        pause = max((one.folder.look_every for one in list(self.queries.values())), default=0.0)
        if reported or now >= self._looked_at + pause:
            self._looked_at = 0.0  # an error is followed by another look
            self.seal_committed()
            self._refuse_stalled_query()
            self._looked_at = now
        self._steps.enter("wait")
        if self._status.state == "waiting":
            self._status.set_state("running")
        if time.monotonic() - self._requests_read_at >= _REQUESTS_EVERY:
            self._requests_read_at = time.monotonic()
            for request in self._requests.list_pending():
                self._answer(request)
        return False

    def _refuse_stalled_query(self) -> None:
        """End the job if a query works for too long without a batch that ends."""
        idle = True
        for name, query in list(self.queries.items()):
            now, batch = time.monotonic(), find_running_batch(query.folder)
            work = _Work(batch, self._reports.count_turns(name))
            before, since = self._doing.get(name, (None, now))
            if work != before or (batch is None and not _is_trigger_active(query.facts.query)):
                self._doing[name] = (work, now)
            elif now - since > self.batch_within:
                raise BATCH_STALLED(
                    pipeline=self._slot_log.pipeline, query=name, seconds=now - since
                )
            idle = idle and batch is None
        if idle:
            self._on_idle()

    def _seal_rest(self) -> bool:
        self.seal_committed()
        behind = [
            query
            for query in self.queries.values()
            if max(list_committed_batches(query.folder), default=-1) > query.sealed
        ]
        if behind:
            time.sleep(_LOOK_EVERY)
        return bool(behind)

    def _guard(self, step: Callable[[], bool]) -> bool:
        """Call a step; True if it should be called again.

        A store that is away is waited for, and one that refuses the keys for ten minutes.
        """
        try:
            again = step()
            self._denied_since = None
            return again
        except (TransientError, StoreDeniedError) as error:
            if error.code in _ENDING or self._is_denied_for_long(error):
                self.fail(error)
                return False
            _log.warning("transient", code=error.code, error=error.message)
            self._status.set_state("waiting", error=error, why="batches are sealed later")
            self._closing.wait(_RETRY_AFTER)
            return True
        except Exception as error:
            self.fail(classify_error(self._slot_log.pipeline, error))
            return False

    def _is_denied_for_long(self, error: TidegateError) -> bool:
        if not isinstance(error, StoreDeniedError):
            return False
        now = time.monotonic()
        self._denied_since = now if self._denied_since is None else self._denied_since
        return now - self._denied_since >= DENIED_PATIENCE

    def fail(self, error: TidegateError) -> None:
        """Note what ends the job, and ask for its end; the first error stays."""
        self.error = self.error or error
        self._stop.set()

    def check_queries(self) -> None:
        """End the job if a sealed query has ended that should not, also if no script looks.

        Either it has failed, or it has no end of its own and no one has asked the job to stop.
        """
        for name in self._reports.failures.keys() & self.queries.keys():
            text = self._reports.failures[name]
            entry = find_passing_error(text) or SCRIPT_FAILED
            if _LOST_RACE in text:
                self.raced.add(name)
                entry = SINK_RACED
            cause = extract_cause(RuntimeError(text))
            error: TidegateError = entry(
                pipeline=self._slot_log.pipeline, query=name, what=f"query {name}", text=cause
            )
            self.fail(error)
        for name in self._reports.ends & self.queries.keys():
            # A stop is noted before it reaches a query.
            if not self._stop.is_set() and self._has_no_end(self.queries[name]):
                self.fail(QUERY_ENDED(pipeline=self._slot_log.pipeline, query=name))

    def _has_no_end(self, query: SealedQuery) -> bool:
        return not self.may_end and query.facts.trigger not in _TRIGGERS_THAT_END

    def require_no_failure(self) -> None:
        """Make sure that no query that was started has failed.

        Spark itself is asked. A script may pass over the error of a query, and Spark's report of it
        comes a little later.

        Raises:
            PoisonError: a query has failed, or as in `check_queries`.
            Py4JError: the JVM does not answer.
        """
        for name, started in self._list_started():
            error = started.exception()
            if error is not None:
                self._reports.failures.setdefault(name, str(error))
        self.check_queries()
        if self.error is not None:
            raise self.error

    def require_ends(self) -> None:
        """Make sure that each query that was started has come to an end of its own.

        A JVM that was killed has no active query either, so Spark itself is asked.

        Raises:
            PoisonError, Py4JError: as in `require_no_failure`; or a query has ended early.
        """
        self.require_no_failure()
        self._reports.ends |= {name for name, _ in self._list_started()}
        self.check_queries()
        if self.error is not None:
            raise self.error

    def _list_started(self) -> list[tuple[str, Any]]:
        """List the queries that have started; the script may have caught the error of a start."""
        known = ((name, one.facts.query) for name, one in self.queries.items())
        return [(name, started) for name, started in known if started is not None]

    def _answer(self, request: DriverRequest) -> None:
        refusal = request.refusal_outcome(self._steps.lease.token, SYSTEM_CLOCK.wall_ticks())
        head = self._sealer.head.checkpoint
        outcome, detail = refusal or AckOutcome.REFUSED, "a job cannot do this"
        if refusal is not None:
            detail = "meant for another driver, or too old"
        elif request.kind in ENDING_KINDS:
            outcome, detail = AckOutcome.APPLIED, "stopping"
            self._stop.set()
        elif request.kind in PINNING_KINDS and head is not None:
            outcome, detail = pin_for_request(self._slot_log, request, head)
        self._requests.acknowledge(request, outcome, detail, self._steps.lease.token, head)


def find_passing_error(text: str) -> ErrorDefinition | None:
    """Return the entry for an error of Spark that another launch may not meet; None for others."""
    if _BUCKET_AWAY.search(text):
        return BUCKET_AWAY
    return WORKER_LATE if _WORKER_LATE in text else None


def _is_trigger_active(query: Any) -> bool:
    """Return whether a query works; False if it has ended, or its JVM does not answer."""
    try:
        return query is not None and bool(query.status["isTriggerActive"])
    except Exception:  # py4j raises what a JVM that ends gives it
        return False


def find_watermark_holder(query: Any) -> str | None:
    """Return Spark's descriptions of the sources behind the watermark that decides.

    Spark's reports do not name them. It keeps one watermark per `withWatermark` of the query, in
    internal objects: read on Spark 4.1.3 (`WatermarkTracker`, `EventTimeWatermark.nodeId`).

    Args:
        query: of PySpark; None before it has started.

    Returns:
        None without a watermark, or if this Spark keeps it elsewhere.
    """
    if query is None:
        return None
    try:
        known = _find_watermarks(query)
        if len(known) > 1:
            known = [_choose_watermark(query, known)]
    except Exception as error:  # py4j raises whatever another Spark, or one that ends, gives it
        _log.debug("watermark_holder_unknown", why=str(error)[:200])
        return None
    return known[0][1] if known else None


@lru_cache
def _find_watermarks(query: Any) -> list[_Watermark]:
    """Return the watermarks of a query with their sources; the plan stays as it is for its run.

    A walk through the plan costs a hundred calls into the JVM, too many for each batch.
    """
    return list(_list_watermarks(query._jsq.streamingQuery().logicalPlan()))


def _choose_watermark(query: Any, known: list[_Watermark]) -> _Watermark:
    execution = query._jsq.streamingQuery()
    marks = execution.watermarkTracker().watermarkMap()
    policy = execution.sparkSession().conf().get(_WATERMARK_POLICY, "min")

    def read_mark(one: _Watermark) -> int:
        mark = marks.apply(one[0].nodeId())
        return int(mark.get()) if mark.isDefined() else 0

    return (max if policy == "max" else min)(known, key=read_mark)


def _list_watermarks(plan: Any) -> Iterator[_Watermark]:
    """Yield the watermarks of a logical plan, each with the sources below it."""
    if plan.nodeName() == "EventTimeWatermark":
        yield plan, " + ".join(_list_sources(plan))
    for child in _list_children(plan):
        yield from _list_watermarks(child)


def _list_sources(plan: Any) -> list[str]:
    """List the sources below a node of a logical plan."""
    children = _list_children(plan)
    if children:
        return [source for child in children for source in _list_sources(child)]
    if not plan.isStreaming():
        return []  # a table that the script joins
    reader = plan.source if plan.nodeName() == "StreamingExecutionRelation" else plan.stream
    return [str(reader().toString())]


def _list_children(plan: Any) -> list[Any]:
    children = plan.children()
    return [children.apply(number) for number in range(children.size())]
