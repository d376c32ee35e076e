"""One run of a job, from the spec to the exit code.

1. Open the store; wait until the job should run; take the lease.
2. Select the sealed batch to go on from, and the folder for Spark's checkpoints.
3. Run the script in the main thread, while another thread seals what Spark commits.
4. When the script, a request, a signal or an error ends it: stop the queries, seal the rest, write
   why, and release the lease.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import structlog

from tidegate import __version__
from tidegate.checkpoints.batch_notes import BatchNotes
from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store, require_honest_store
from tidegate.errors import TidegateError, TransientError, get_first_line
from tidegate.jobs.driver.epoch_listeners import close_receivers, open_metrics
from tidegate.jobs.driver.epoch_loop import RunOutcome
from tidegate.jobs.driver.error_classification import classify_error
from tidegate.jobs.driver.errors import OTHER_KIND, UNEXPECTED
from tidegate.jobs.driver.housekeeping import Housekeeper
from tidegate.jobs.driver.pipeline_run import open_run
from tidegate.jobs.driver.startup import LeaderElection, select_head
from tidegate.jobs.driver.status_reporter import DriverSteps, StatusReporter
from tidegate.jobs.spark.spark_session import build_archive_options
from tidegate.jobs.spec.job_spec import JobSpec, is_query_name

from .batch_sealer import BatchSealer, JobAuthor, SealedQuery
from .checkpoint_files import (
    delete_uncommitted_state,
    find_running_batch,
    read_query_id,
)
from .errors import (
    BAD_QUERY_NAME,
    CHECKPOINT_TAKEN,
    CONTINUOUS_QUERY,
    NO_QUERY,
    NO_SCRIPT,
    NOT_LOCAL,
    QUERY_STARTED_TWICE,
    REMOTE_CHECKPOINT,
    SCRIPT_FAILED,
    UNNAMED_QUERY,
)
from .job_location import (
    JobLocation,
    describe_location,
    find_jobs_home,
    get_jvm_pid,
    open_location,
)
from .seal_loop import SealLoop, SparkListener, SparkReports
from .sink_restore import (
    SealedPoint,
    choose_rewind,
    find_local_folder,
    find_sink_log,
    restore_sink,
)
from .writer_hooks import (
    WriterFacts,
    choose_older_kafka_reader,
    install_hooks,
)

_log = structlog.get_logger("tidegate.job")

_POLL_INTERVAL = 0.2  # seconds
_BATCH_ENDS_WITHIN = 30.0  # seconds; then a query is stopped inside its batch
_QUERIES_END_WITHIN = 90.0  # seconds
_FAILURE_REPORTED_WITHIN = 3.0  # seconds after the script has seen that a query failed
_SCRIPT_ENDS_WITHIN = 20.0  # seconds after its queries; then the process ends without it
_ADOPTED_FILE = "_tidegate_adopted"
# Prepended to `extraJavaOptions`, which the script or the site's spark-defaults.conf may set.
_JVM_OPTIONS = "spark.driver.defaultJavaOptions"


@dataclass(frozen=True)
class JobOptions:
    """How to run a job, as opposed to what.

    Attributes:
        store_url: ``s3://bucket/prefix`` or a folder.
        script: path of the script.
        recover_to: ``latest``, ``latest_healthy`` or a checkpoint id.
        asked_by: the person who starts this run. The run then clears an earlier ``tidegate stop``.
        home: folder of the checkpoint folders of all jobs on this host; by default that of
            `find_jobs_home`.
        on_seal: called with each sealed batch.
    """

    store_url: str
    script: Path
    recover_to: str = "latest"
    asked_by: str | None = None
    home: Path = field(default_factory=find_jobs_home)
    on_seal: Callable[[Manifest], None] = lambda _manifest: None


def find_script(spec: JobSpec, spec_path: Path) -> Path:
    """Return the script: relative to the working folder, or to the folder of the spec.

    Raises:
        ConfigurationError: there is none.
    """
    for folder in (Path.cwd(), spec_path.absolute().parent):
        if (folder / spec.app).is_file():
            return folder / spec.app
    raise NO_SCRIPT(pipeline=spec.name, app=spec.app)


def run_job_until_end(spec: JobSpec, options: JobOptions) -> RunOutcome:
    """Run one job in this process, in the main thread, and return how it ended.

    SIGTERM and SIGINT stop it: each query between two batches, or after 30 s inside one. If the
    script goes on 20 s after its queries have ended, the rest is sealed and the whole process ends
    (`os._exit`).

    Raises:
        TidegateError: what ended the run.
    """
    with open_run(spec.name, options.store_url) as (store, stop, retry):
        home = options.home / spec.name
        home.mkdir(parents=True, exist_ok=True)
        alive = home / "alive"
        election = LeaderElection(store, spec.name, stop, retry, standby=False, alive=alive)
        if options.asked_by is not None:
            election.clear_stop(options.asked_by)
        election.wait_until_wanted()
        retry(require_honest_store, store)
        uid = retry(ensure_identity, store, spec.name)
        lease = election.acquire_lease(uid)
        assert lease is not None  # noqa: S101 - only a standby ends without one
        with contextlib.closing(JobSession(spec, options, store, lease, uid, stop)) as session:
            outcome = session.run_to_end()
    _log.info("ended", pipeline=spec.name, state=outcome.state, why=outcome.why)
    return outcome


class JobSession:
    """The parts and threads of a job that exist while its lease is held.

    Threads start with the object: `close` has to be called, also if the run fails.
    """

    def __init__(
        self,
        spec: JobSpec,
        options: JobOptions,
        store: Store,
        lease: Lease,
        uid: str,
        stop: threading.Event,
    ) -> None:
        self._spec, self._options, self._store, self._stop = spec, options, store, stop
        self._uid = uid
        self._digest = spec.digest(options.script.read_bytes())
        self._slot_log = SlotLog(store, spec.name)
        self._steps = DriverSteps(lease, spec.checkpoint.max_clock_step)
        self._steps.start()
        self._housekeeper = Housekeeper(spec, self._slot_log).start()
        facts = {
            "pipeline": spec.name,
            "pid": os.getpid(),
            "code_version": __version__,
            "spec_digest": self._digest,
        }
        self._status = StatusReporter(store, self._steps, facts)
        self._metrics, self._closers = open_metrics(spec.name, self._status.snapshot)
        self._reports = SparkReports()
        self._sessions: list[Any] = []
        self._script_ended = threading.Event()

    @cached_property
    def _location(self) -> JobLocation:
        """The folder of this launch, made after the head has been selected."""
        home = self._options.home / self._spec.name
        return open_location(home, self._slot_log.head(), self._steps.lease.token)

    @cached_property
    def _loop(self) -> SealLoop:
        author = JobAuthor(self._uid, self._digest, describe_location(self._location))
        sealer = BatchSealer(self._slot_log, self._steps.lease, author, self._report_seal)
        on_idle = self._metrics.note_turn if self._metrics else lambda: None
        own = (self._slot_log, self._steps, self._status, self._stop, on_idle)
        return SealLoop(sealer, self._reports, *own)

    def run_to_end(self) -> RunOutcome:
        """Run the script, seal its batches, and write and return how it ended.

        Raises:
            TidegateError: what ended it.
        """
        self._status.start(self._collect_live_facts)
        try:
            outcome = self._run()
        except Exception as error:
            reported = self._classify(error)
            self._status.set_state("failed", error=reported)
            raise reported from error
        self._status.set_state(outcome.state, why=outcome.why)
        return outcome

    def close(self) -> None:
        """Stop Spark, whoever started it in this process, and the threads; release the lease."""
        from pyspark import SparkContext

        self._housekeeper.stop()
        context = SparkContext._active_spark_context
        if context is not None:
            with contextlib.suppress(Exception):  # the JVM may be gone
                context.stop()
        self._status.stop()
        self._steps.stop()
        with contextlib.suppress(TransientError):
            self._steps.lease.release()
        close_receivers(self._closers)

    def _run(self) -> RunOutcome:
        spec = self._spec
        key = BucketLayout(spec.name).spec_key(self._digest)
        self._store.put(key, spec.model_dump_json(by_alias=True).encode())
        select_head(
            spec, self._slot_log, self._steps.lease, self._options.recover_to, self._require_job
        )
        self._steps.enter("wait")
        self._loop.start()
        watching = threading.Thread(target=self._watch, name="tidegate-watch", daemon=True)
        watching.start()
        try:
            with install_hooks(
                self._prepare_builder, self._adopt_session, self._start_query, self._note_query
            ):
                self._run_script()
                self._wait_for_queries()
        except KeyboardInterrupt:  # PySpark has its own handler of Ctrl-C
            self._stop.set()
        finally:
            self._script_ended.set()
            self._stop_queries()
            self._loop.close()
        if self._loop.error is not None:
            raise self._loop.error
        if self._stop.is_set():
            return RunOutcome("stopped", "a signal or a request asked for it")
        return RunOutcome("finished", "the script and its queries have ended")

    def _run_script(self) -> None:
        script = self._options.script
        with _set_arguments(script, self._spec.args):
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise self._fail(f"the script ended with {end.code!r}") from end
            except Exception as error:
                # What ended the queries also ends the script: their error says more.
                if not self._is_ending(error):
                    raise

    def _is_ending(self, error: Exception) -> bool:
        """Whether the job ends for another reason; Spark reports a failed query a moment later."""
        from pyspark.errors import StreamingQueryException

        wait = _FAILURE_REPORTED_WITHIN if isinstance(error, StreamingQueryException) else 0.0
        return self._stop.wait(wait)

    def _wait_for_queries(self) -> None:
        """Wait for the queries that the script has left running.

        Raises:
            ConfigurationError: it has not started the queries that the spec names.
        """
        while not self._stop.is_set() and self._list_active():
            time.sleep(_POLL_INTERVAL)
        started = self._loop.queries
        missing = sorted(set(self._spec.queries) - set(started))
        if not self._stop.is_set() and (missing or not started):
            names = ", ".join(missing) or "with a name"
            raise NO_QUERY(pipeline=self._spec.name, app=self._spec.app, queries=names)

    def _watch(self) -> None:
        """In a thread: end the script when the job should end."""
        while not self._stop.wait(_POLL_INTERVAL):
            self._loop.check_queries()
        self._status.set_state("draining", error=self._loop.error)
        # In a thread: Spark waits without an end for a batch that does not react.
        stopping = threading.Thread(target=self._stop_queries, name="tidegate-stop", daemon=True)
        stopping.start()
        stopping.join(_QUERIES_END_WITHIN)
        if not self._script_ended.wait(_SCRIPT_ENDS_WITHIN):
            self._leave_script()

    def _leave_script(self) -> None:
        """End the process although the script goes on; its queries have ended."""
        self._loop.close()
        error = self._loop.error
        state = "failed" if error else "stopped"
        self._status.set_state(state, error=error, why="the script did not end with its queries")
        _log.warning("script_left", pipeline=self._spec.name)
        self.close()
        os._exit(error.failure_class.exit_code if error else 0)

    def _stop_queries(self) -> None:
        """Stop each query between two batches if it gets there in time; at once without a lease."""
        patience = 0.0 if self._steps.lost.is_set() else _BATCH_ENDS_WITHIN
        for query in self._list_active():
            deadline, ended = time.monotonic() + patience, self._reports.ended
            with contextlib.suppress(Exception):  # the session may be stopped, or the JVM gone
                while (
                    query.isActive
                    and query.status["isTriggerActive"]
                    and self._reports.ended == ended
                    and time.monotonic() < deadline
                ):
                    time.sleep(0.02)
                query.stop()

    def _list_active(self) -> list[Any]:
        found = []
        for session in self._sessions:
            with contextlib.suppress(Exception):  # a stopped session has no queries
                found += session.streams.active
        return found

    def _require_job(self, manifest: Manifest) -> None:
        if BatchNotes.from_manifest(manifest) is None:
            raise OTHER_KIND(pipeline=self._spec.name, found="pipeline", given="job")

    def _prepare_builder(self, builder: Any) -> None:
        builder.config("spark.master", builder._options.get("spark.master", "local[*]"))
        for key, value in self._spec.conf.items():
            builder.config(key, value)
        given, ours = builder._options.get(_JVM_OPTIONS, ""), build_archive_options()
        if ours not in given:  # a script may ask for its session several times
            builder.config(_JVM_OPTIONS, f"{ours} {given}".strip())

    def _adopt_session(self, session: Any) -> None:
        """Take a session of the script, once.

        Raises:
            ConfigurationError: its executors are elsewhere.
        """
        if any(session is known for known in self._sessions):
            return
        if not hasattr(session, "_jsparkSession"):
            raise NOT_LOCAL(pipeline=self._spec.name, master="Spark Connect")
        master = session.sparkContext.master
        if not master.startswith("local") or master.startswith("local-cluster"):
            raise NOT_LOCAL(pipeline=self._spec.name, master=master)
        self._location.note_jvm(get_jvm_pid(session))
        session.streams.addListener(SparkListener(self._reports))
        self._sessions.append(session)
        self._status.set_state("running")

    def _start_query(self, facts: WriterFacts) -> Path | None:
        """Prepare the checkpoint and the sink of a query that the script is about to start."""
        location, spec, name = self._location, self._spec, facts.name
        if self._stop.is_set():
            raise SystemExit  # the queries were stopped before this one
        if name is None and not spec.queries:
            raise UNNAMED_QUERY(pipeline=spec.name)
        if name is None or not spec.seals(name):
            return None
        self._refuse_bad_query(name, facts)
        folder, (batch, sealed_at) = location.folder / name, location.get_sealed_batch(name)
        is_new = not folder.exists()
        objects, restored = location.prepare_query(self._store, name)
        rewind = choose_rewind(facts, repeatable=name in spec.repeatable)
        before = self._list_query_ids(name) if is_new else frozenset()
        if is_new and (batch is not None or before):
            sealed = restored or folder
            point = SealedPoint(before | {read_query_id(sealed) or ""}, batch, sealed_at)
            restore_sink(spec.name, facts, sealed, point, rewind)
        if restored is not None:
            restored.replace(folder)
        if facts.location is not None:
            self._replace_location(name, facts.location, folder)
        if (begun := find_running_batch(folder)) is not None:
            _log.info("batch_repeated", query=name, batch=begun)
            choose_older_kafka_reader(facts.session)
        self._loop.queries[name] = SealedQuery(
            name,
            folder,
            objects,
            rewind,
            facts.format or "parquet",
            find_sink_log(facts),
            facts.interval,
            sealed=-1 if batch is None else batch,
        )
        return folder

    def _note_query(self, facts: WriterFacts, query: Any) -> None:
        """Keep PySpark's query, which knows more than the reports of the listener."""
        if sealed := self._loop.queries.get(facts.name or ""):
            sealed.handle = query

    def _refuse_bad_query(self, name: str, facts: WriterFacts) -> None:
        spec = self._spec
        if not is_query_name(name):
            raise BAD_QUERY_NAME(pipeline=spec.name, query=name)
        if name in self._loop.queries:
            raise QUERY_STARTED_TWICE(pipeline=spec.name, query=name)
        if facts.trigger in ("continuous", "realTime"):
            raise CONTINUOUS_QUERY(pipeline=spec.name, query=name, trigger=facts.trigger)

    def _list_query_ids(self, query: str) -> frozenset[str]:
        """Return the ids that a query has had in this timeline and in those that were left.

        Empty if it was never sealed; a slot of an older version gives an empty id.
        """
        ends = [self._location.manifest]
        for fork in self._slot_log.list_forks():
            filled = self._slot_log.read_slot(fork.timeline, fork.slot - 1)
            if filled is not None and isinstance(filled.record, Manifest):
                ends.append(filled.record)
        found = (BatchNotes.from_manifest(end) for end in ends)
        return frozenset(
            notes.queries[query].id or "" for notes in found if notes and query in notes.queries
        )

    def _replace_location(self, name: str, given: str, folder: Path) -> None:
        """Adopt the checkpoint that the script names if the job has never sealed a batch.

        Raises:
            ConfigurationError: it cannot be read here, or another job has adopted it.
        """
        _log.info("checkpoint_replaced", query=name, given=given, used=str(folder))
        if not self._location.is_first:
            return
        old = find_local_folder(given)
        if old is None:
            raise REMOTE_CHECKPOINT(pipeline=self._spec.name, query=name, location=given)
        if not (old / "metadata").is_file() or folder.exists():
            return
        owner = f"{self._spec.name} {self._uid}"
        marker = old / _ADOPTED_FILE
        with contextlib.suppress(FileExistsError), marker.open("x", encoding="utf-8") as file:
            file.write(owner)
        if (taken := marker.read_text("utf-8")) != owner:
            fields = {"query": name, "location": old, "owner": taken, "marker": marker}
            raise CHECKPOINT_TAKEN(pipeline=self._spec.name, **fields)
        # Under another name until it is whole: a crash must not leave a part of a checkpoint.
        part = folder.with_name(f"{name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(old, part, ignore=shutil.ignore_patterns(_ADOPTED_FILE, ".*.crc"))
        delete_uncommitted_state(part)
        part.replace(folder)
        _log.info("checkpoint_adopted", query=name, given=str(old))

    def _report_seal(self, manifest: Manifest) -> None:
        seconds = manifest.timings.get("triggerExecution", 0.0)
        self._status.record_epoch(manifest, seconds)
        if self._metrics is not None:
            self._metrics.record_sealed(manifest, seconds)
        self._options.on_seal(manifest)

    def _collect_live_facts(self) -> dict[str, object]:
        """Return what Spark last reported about each query."""
        trouble = self._steps.trouble or self._housekeeper.trouble
        shown = ("batchId", "timestamp", "numInputRows", "processedRowsPerSecond", "batchDuration")
        return {
            "queries": {
                name: {fact: report[fact] for fact in shown if fact in report}
                for name, report in self._reports.latest.items()
            },
            "trouble": trouble.as_dict() if trouble else None,
        }

    def _classify(self, error: Exception) -> TidegateError:
        reported = classify_error(self._spec.name, error)
        unexpected = reported.code == UNEXPECTED.code
        return self._fail(get_first_line(error)) if unexpected else reported

    def _fail(self, text: str) -> TidegateError:
        return SCRIPT_FAILED(pipeline=self._spec.name, what="the script", text=text[:500])


@contextlib.contextmanager
def _set_arguments(script: Path, arguments: tuple[str, ...]) -> Iterator[None]:
    """Give the script its arguments and its own folder, as Python would."""
    before = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.absolute().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
