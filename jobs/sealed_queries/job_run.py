"""One run of a job, from the spec to the exit code.

1. Open the store; wait until the job should run; take the lease.
2. Select the sealed batch to go on from, and the folder for Spark's checkpoints.
3. Run the script in the main thread, while another thread seals what Spark commits.
4. When the script, a request, a signal or an error ends it: stop the queries, seal the rest, write
   why, and release the lease.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import structlog

from tidegate.checkpoints.batch_notes import BatchNotes, SinkRewind
from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.store import CopyingStore, Store
from tidegate.errors import TidegateError, get_first_line
from tidegate.jobs.driver.epoch_listeners import LaunchListeners
from tidegate.jobs.driver.epoch_loop import RunOutcome
from tidegate.jobs.driver.error_classification import classify_error
from tidegate.jobs.driver.errors import JVM_LOST, OTHER_KIND, UNEXPECTED
from tidegate.jobs.driver.pipeline_run import open_run
from tidegate.jobs.driver.startup import (
    ALIVE_FILE,
    ENDED_BEFORE_LEASE,
    LaunchOptions,
    LeaderElection,
    LeasedSession,
    select_head,
)
from tidegate.jobs.sinks.lineage_position import FollowerPosition, describe_restore
from tidegate.jobs.spark.spark_session import (
    build_archive_options,
    extract_cause,
    is_submitted,
)
from tidegate.jobs.spec.job_spec import JobSpec, is_query_name
from tidegate.jobs.spec.operations import add_bucket_jars
from tidegate.jobs.spec.source_options import (
    resolve_environment_value,
    resolve_environment_values,
)
from tidegate.jobs.spec.spec_masks import mask_secrets
from tidegate.json_types import JsonObject
from tidegate.secret_masks import mask_values

from .batch_sealer import BatchSealer, JobAuthor, SealedQuery
from .checkpoint_files import find_planned_batch, find_running_batch, read_query_id
from .checkpoint_folder import BucketFolder, HostFolder
from .errors import (
    BAD_QUERY_NAME,
    CONTINUOUS_QUERY,
    NO_BUCKET,
    NO_QUERY,
    NO_SCRIPT,
    NOT_LOCAL,
    QUERY_STARTED_TWICE,
    SCRIPT_FAILED,
    START_STALLED,
    UNNAMED_QUERY,
    UNSEEN_QUERY,
)
from .job_location import (
    JobLocation,
    adopt_checkpoint,
    describe_location,
    find_jobs_home,
    get_jvm_pid,
    open_location,
    set_bucket_access,
)
from .jvm_watchdog import JvmWatchdog
from .script_run import run_script
from .seal_loop import SealLoop, SparkReports, find_passing_error
from .sink_restore import (
    SealedPoint,
    build_commit_marks,
    choose_rewind,
    list_lineage,
    list_query_ids,
    refuse_sink_ahead,
    restore_sink,
)
from .stop_signals import keep_stop_handlers
from .writer_hooks import (
    WriterFacts,
    choose_older_kafka_reader,
    install_hooks,
    mask_settings,
)

_log = structlog.get_logger("tidegate.job")

_POLL_INTERVAL = 0.2  # seconds
_BATCH_ENDS_WITHIN = 30.0  # seconds; then a query is stopped inside its batch
_QUERIES_END_WITHIN = 90.0  # seconds
_SCRIPT_ENDS_WITHIN = 20.0  # seconds after its queries; then the process ends without it
# Prepended to `extraJavaOptions`, which the script or the site's spark-defaults.conf may set.
_JVM_OPTIONS = "spark.driver.defaultJavaOptions"


@dataclass(frozen=True)
class JobOptions(LaunchOptions):
    """How to run a job.

    Attributes:
        script: path of the script.
        place: where the script takes itself to lie, if it is a copy.
        home: folder of the checkpoint folders of all jobs on this host; by default that of
            `find_jobs_home`.
        on_seal: called with each sealed batch.
    """

    script: Path
    place: Path | None = None
    home: Path = field(default_factory=find_jobs_home)
    on_seal: Callable[[Manifest], None] = lambda _manifest: None


def require_script(spec: JobSpec, script: Path | None) -> Path:
    """Return the script.

    Raises:
        ConfigurationError: there is none.
    """
    if script is None or not script.is_file():
        raise NO_SCRIPT(pipeline=spec.name, app=spec.app)
    return script


def run_job_until_end(spec: JobSpec, options: JobOptions) -> RunOutcome:
    """Run one job in this process, in the main thread, and return how it ended.

    SIGTERM and SIGINT stop it, whatever handlers the script has: each query between two batches, or
    after 30 s inside one. If the script goes on 20 s after its queries have ended, the rest is
    sealed and the whole process ends (`os._exit`).

    Raises:
        TidegateError: what ended the run.
    """
    with open_run(spec.name, options.store_url, options.deploy) as (store, stop, retry):
        # Without it, functions in Python run with whatever is called python3.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        home = options.home / spec.name
        # Rows are in its files, as state and as plans of batches.
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o700)
        election = LeaderElection(store, spec.name, stop, retry, options, home / ALIVE_FILE)
        if not election.wait_until_wanted():
            return ENDED_BEFORE_LEASE
        outcome = election.run_session(
            # It takes a second, which a take-over then saves.
            lambda: options.standby and import_module("pyspark.sql"),
            lambda uid, lease: JobSession(spec, options, store, lease, uid, stop),
        )
    _log.info("ended", pipeline=spec.name, state=outcome.state, why=outcome.why)
    return outcome


class JobSession(LeasedSession):
    """A job while its lease is held."""

    _listeners: LaunchListeners

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
        self._conf = resolve_environment_values("conf", spec.conf, os.environ)
        self._arguments = [
            resolve_environment_value(f"args.{place}", text, os.environ)
            for place, text in enumerate(spec.args)
        ]
        mask_values({*self._conf.values(), *self._arguments} - {*spec.conf.values(), *spec.args})
        self._secrets = [key for key, value in self._conf.items() if value != spec.conf[key]]
        self._digest = spec.digest(options.script.read_bytes())
        super().__init__(spec, store, lease, self._digest, options.deploy)
        self._listeners = LaunchListeners(spec.name, self._status.snapshot, uid, lease.token)
        self._reports = SparkReports()
        self._sessions: list[Any] = []
        self._script_ended = threading.Event()
        self._began = time.monotonic()
        self._jvm: ProcessIdentity | None = None
        self._watchdog: JvmWatchdog | None = None
        self._forgotten: set[str] = set()  # queries that Spark begins anew at each start

    @cached_property
    def _location(self) -> JobLocation:
        """The folder of this launch, made after the head has been selected.

        Raises:
            ConfigurationError: it should be in the bucket, and the store is none.
        """
        spec, store = self._spec, self._store
        launches: BucketFolder | None = None
        if spec.checkpoint.location == "bucket":
            if not isinstance(store, CopyingStore):
                raise NO_BUCKET(pipeline=spec.name, url=store.url)
            launches = BucketFolder(store, BucketLayout(spec.name).launches_prefix)
        home, token = self._options.home / spec.name, self._steps.lease.token
        return open_location(home, self._uid, self._slot_log.head(), token, launches)

    @cached_property
    def _loop(self) -> SealLoop:
        author = JobAuthor(self._uid, self._digest, describe_location(self._location))
        sealer = BatchSealer(self._slot_log, self._steps.lease, author, self._report_seal)
        metrics = self._listeners.metrics
        on_idle = metrics.note_turn if metrics else lambda: None
        own = (self._steps, self._status, self._stop, on_idle)
        loop = SealLoop(sealer, self._reports, *own)
        loop.may_end, loop.batch_within = self._spec.may_end, self._spec.batch_within / 1e6
        return loop

    def close(self) -> None:
        """Stop Spark, whoever started it in this process, and the threads; release the lease."""
        from pyspark import SparkContext

        context = SparkContext._active_spark_context
        if context is not None:
            with contextlib.suppress(Exception):  # the JVM may be gone
                context.stop()
        if self._watchdog is not None:
            self._watchdog.close()
        super().close()

    def _run(self) -> RunOutcome:
        spec = self._spec
        key = BucketLayout(spec.name).spec_key(self._digest)
        self._store.put(key, mask_secrets(spec).model_dump_json(by_alias=True).encode())
        select_head(
            spec, self._slot_log, self._steps.lease, self._options.recover_to, self._require_job
        )
        self._steps.enter("wait")
        return self._run_until_ended()

    def _run_until_ended(self) -> RunOutcome:
        self._loop.start()
        watching = threading.Thread(target=self._watch, name="tidegate-watch", daemon=True)
        watching.start()
        failure: Exception | None = None
        callbacks = (self._choose_settings, self._adopt_session, self._start_query)
        hooks = install_hooks(*callbacks, secrets=self._secrets)
        try:
            with keep_stop_handlers(), hooks:
                self._run_script()
                self._wait_for_queries()
        except KeyboardInterrupt:
            self._stop.set()
        except Exception as error:
            failure = error
        finally:
            self._script_ended.set()
            self._stop_queries()
            self._loop.close()
        try:
            return self._judge_end(failure)
        finally:
            self._give_up_raced_queries()

    def _give_up_raced_queries(self) -> None:
        for name in self._loop.raced:
            self._location.give_up_query(name)

    def _judge_end(self, failure: Exception | None) -> RunOutcome:
        """Return how the job ended, or raise what ended it; the first reason that holds counts.

        What ends the queries often ends the script as well, with an error or an exit code of its
        own. So what this process and Spark know comes first.

        Args:
            failure: how the script ended; None if it returned, or ended with 0.
        """
        if self._loop.error is not None:
            raise self._loop.error
        if self._stop.is_set():
            return RunOutcome("stopped", "a signal or a request asked for it")
        self._loop.require_no_failure()
        if failure is not None:
            raise failure
        self._loop.require_ends()
        return RunOutcome("finished", "the script and its queries have ended")

    def _run_script(self) -> None:
        options = self._options
        try:
            run_script(options.script, options.place or options.script, self._arguments)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise self._fail(f"the script ended with {end.code!r}") from end

    def _wait_for_queries(self) -> None:
        """Wait for the queries that the script has left running.

        Raises:
            ConfigurationError: it has not started the queries that the spec names.
        """
        while not self._stop.is_set() and self._list_active():
            time.sleep(_POLL_INTERVAL)
        missing = self._list_missing_queries()
        if missing and not self._stop.is_set():
            raise NO_QUERY(pipeline=self._spec.name, app=self._spec.app, queries=missing)

    def _watch(self) -> None:
        """In a thread: end the script when the job should end."""
        while not self._stop.wait(_POLL_INTERVAL):
            if self._script_ended.is_set():
                return  # how it ended is judged in the main thread
            self._loop.check_queries()
            self._refuse_unseen_queries()
            self._refuse_stalled_start()
            self._refuse_lost_jvm()
        self._status.set_state("draining", error=self._loop.error)
        # In a thread: Spark waits without an end for a batch that does not react.
        stopping = threading.Thread(target=self._stop_queries, name="tidegate-stop", daemon=True)
        stopping.start()
        stopping.join(_QUERIES_END_WITHIN)
        if not self._script_ended.wait(_SCRIPT_ENDS_WITHIN):
            # The process ends although the script goes on; its queries have ended.
            self._loop.close()
            self._give_up_raced_queries()
            error = self._loop.error
            state = "failed" if error else "stopped"
            self._note_end(state, error, "the script did not end with its queries")
            _log.warning("script_left", pipeline=self._spec.name)
            self.close()
            os._exit(error.failure_class.exit_code if error else 0)

    def _refuse_unseen_queries(self) -> None:
        """End the job if a query that should be sealed was started past the hooks."""
        for name in self._reports.list_started():
            if self._spec.seals(name) and name not in self._forgotten.union(self._loop.queries):
                self._loop.fail(UNSEEN_QUERY(pipeline=self._spec.name, query=name))

    def _refuse_stalled_start(self) -> None:
        """End the job if the script takes too long to start the queries of the spec, or any."""
        missing, seconds = self._list_missing_queries(), time.monotonic() - self._began
        if missing and seconds > self._spec.start_within / 1e6:
            names = {"queries": missing, "seconds": seconds}
            self._loop.fail(START_STALLED(pipeline=self._spec.name, **names))

    def _refuse_lost_jvm(self) -> None:
        """End the job if its JVM is gone, also if the script does not notice."""
        if self._jvm is not None and self._jvm.is_proven_dead():
            text = "its process has ended"
            self._loop.fail(JVM_LOST(pipeline=self._spec.name, what="JVM", text=text))

    def _list_missing_queries(self) -> str:
        """Name the queries that should have been started and were not; empty without one."""
        started = self._forgotten.union(self._loop.queries)
        missing = sorted(set(self._spec.queries) - started)
        return ", ".join(missing) or ("" if started else "with a name")

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

    def _choose_settings(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Return the settings of a session or a context that replace those of the script."""
        chosen = self._conf | mask_settings(self._secrets, {**given, **self._conf})
        settings = {**given, **chosen}
        if "spark.remote" in settings or os.environ.get("SPARK_REMOTE"):
            raise NOT_LOCAL(pipeline=self._spec.name, master="Spark Connect")
        # Without one Spark takes that of spark-submit, of spark-defaults.conf, or this host.
        if (master := settings.get("spark.master")) is not None:
            self._refuse_other_master(master)
        if self._location.bucket is not None and not is_submitted():
            chosen |= add_bucket_jars(settings)
        jvm_options, ours = settings.get(_JVM_OPTIONS, ""), build_archive_options()
        if ours not in jvm_options:  # a script may ask for its session several times
            chosen[_JVM_OPTIONS] = f"{ours} {jvm_options}".strip()
        return chosen

    def _refuse_other_master(self, master: str) -> bool:
        """Refuse executors elsewhere unless they can reach the checkpoint; False if they can."""
        is_local = master.startswith("local") and not master.startswith("local-cluster")
        if not is_local and self._location.bucket is None:
            raise NOT_LOCAL(pipeline=self._spec.name, master=master)
        return is_local

    def _adopt_session(self, session: Any) -> None:
        """Take a session of the script, once.

        Raises:
            ConfigurationError: its executors are elsewhere, where only the bucket can be reached.
        """
        if any(session is known for known in self._sessions):
            return
        if not hasattr(session, "_jsparkSession"):
            raise NOT_LOCAL(pipeline=self._spec.name, master="Spark Connect")
        is_local = self._refuse_other_master(session.sparkContext.master)
        # Nothing here proves the end of executors elsewhere: the next launch gets a new folder.
        pid = get_jvm_pid(session)
        self._location.note_jvm(pid if is_local else None)
        if pid is not None and self._watchdog is None:
            self._jvm = ProcessIdentity.of_process(pid)
            self._watchdog = JvmWatchdog(pid, lambda: self._steps.lease.remaining_seconds)
        session.streams.addListener(self._reports)
        self._sessions.append(session)
        self._status.set_state("running")

    def _start_query(self, facts: WriterFacts) -> str | None:
        """Prepare the checkpoint and the sink of a query that the script is about to start.

        Returns:
            The checkpoint location, or None to leave the script's own.
        """
        if self._stop.is_set():
            raise SystemExit  # the queries were stopped before this one
        location, spec, name = self._location, self._spec, self._select_name(facts)
        if name is None:
            return None
        self._refuse_bad_query(name, facts)
        folder, batch = location.get_folder(name), location.get_sealed_batch(name)
        head, owner = self._slot_log.head(), f"{self._uid}/{name}"
        is_new = not folder.exists()
        objects, restored = location.prepare_query(self._store, name)
        # A process that slept may have been taken over: the sink is that of the next one then.
        self._steps.require_lease()
        rewind = choose_rewind(facts, repeatable=name in spec.repeatable)
        before = list_query_ids(self._slot_log, location.manifest, name) if is_new else frozenset()
        if is_new and (batch is not None or before):
            sealed = restored or location.folder / name
            ids = before | {read_query_id(HostFolder(sealed)) or ""}
            notice = self._describe_restore() if rewind is SinkRewind.ANNOUNCE else {}
            lineage = list_lineage(self._slot_log, head, name, -1 if batch is None else batch)
            point = SealedPoint(spec.name, ids, batch, owner, lineage, notice)
            restore_sink(facts, sealed, point, rewind)
        if restored is not None:
            location.publish_query(name, restored)
        if facts.location is not None:
            _log.info("checkpoint_replaced", query=name, given=facts.location, used=folder.address)
            if location.is_first:
                adopt_checkpoint(location, name, facts.location, spec.name, self._uid)
        if location.bucket is not None:
            set_bucket_access(facts.session, folder.address, self._conf)
        if (begun := find_running_batch(folder)) is not None:
            _log.info("batch_repeated", query=name, batch=begun)
            choose_older_kafka_reader(facts.session)
        refuse_sink_ahead(spec.name, facts, find_planned_batch(folder))
        facts.marks = build_commit_marks(facts, owner, head.timeline, self._steps.lease.token)
        done = -1 if batch is None else batch
        self._loop.queries[name] = SealedQuery(name, folder, objects, rewind, facts, done)
        return folder.address

    def _select_name(self, facts: WriterFacts) -> str | None:
        """Return the name of a query that is sealed, and give it one; None for another query."""
        spec = self._spec
        if facts.name is None and not spec.queries:
            if spec.name in self._loop.queries:
                raise UNNAMED_QUERY(pipeline=spec.name)
            facts.name = spec.name
        if facts.name is None or not spec.seals(facts.name):
            return None
        if facts.is_forgotten():
            why = "its sink forgets with the process"
            _log.warning("query_not_sealed", query=facts.name, why=why)
            self._forgotten.add(facts.name)
            return None
        return facts.name

    def _describe_restore(self) -> JsonObject:
        """Return what tells the readers of a topic from which batch the job goes on."""
        head = self._slot_log.head()
        lineage = self._slot_log.lineage(head.timeline)
        at = FollowerPosition(head.timeline, head.slot)
        return describe_restore(self._spec.name, self._uid, at, lineage)

    def _refuse_bad_query(self, name: str, facts: WriterFacts) -> None:
        spec = self._spec
        if not is_query_name(name):
            raise BAD_QUERY_NAME(pipeline=spec.name, query=name)
        if name in self._loop.queries:
            raise QUERY_STARTED_TWICE(pipeline=spec.name, query=name)
        if facts.trigger == "continuous":
            raise CONTINUOUS_QUERY(pipeline=spec.name, query=name, trigger=facts.trigger)

    def _report_seal(self, manifest: Manifest) -> None:
        seconds = manifest.timings.get("triggerExecution", 0.0)
        self._status.record_epoch(manifest, seconds)
        self._listeners.record_batch(manifest, seconds)
        if self._deploy is not None:
            self._deploy.confirm(self._store)
        self._options.on_seal(manifest)

    def _collect_live_facts(self) -> dict[str, object]:
        """Return what Spark last reported about each query."""
        trouble = self._trouble
        shown = ("batchId", "timestamp", "numInputRows", "processedRowsPerSecond", "batchDuration")
        return {
            "queries": {
                name: {fact: report[fact] for fact in shown if fact in report}
                for name, report in self._reports.latest.items()
            },
            "trouble": trouble.as_dict() if trouble else None,
        }

    def _classify(self, error: Exception) -> TidegateError:
        entry = None if isinstance(error, TidegateError) else find_passing_error(str(error))
        if entry is not None:
            # While a query was started; one that runs fails by itself.
            text = extract_cause(error)
            return entry(pipeline=self._spec.name, what="the script", text=text)
        reported = classify_error(self._spec.name, error)
        unexpected = reported.code == UNEXPECTED.code
        return self._fail(get_first_line(error)) if unexpected else reported

    def _fail(self, text: str) -> TidegateError:
        return SCRIPT_FAILED(pipeline=self._spec.name, what="the script", text=text[:500])
