"""What a job refuses, each with one clear message, and nothing is started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from pyspark.errors import PySparkException
from structlog.testing import capture_logs

from tests.sealed_queries.fake_checkpoint import FakeCheckpoint
from tests.sealed_queries.fake_events import end_query, start_query
from tests.servers.memory_store import Fault, MemoryStore
from tidegate import job
from tidegate.checkpoints.batch_notes import SinkRewind
from tidegate.checkpoints.lease import Lease, evict_lease_holder
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import CopyingStore
from tidegate.errors import (
    ConfigurationError,
    FailureClass,
    FencedError,
    TidegateError,
    TransientError,
)
from tidegate.jobs.cli.main import app
from tidegate.jobs.driver.pipeline_run import stop_on_signals
from tidegate.jobs.driver.startup import LeaderElection
from tidegate.jobs.sealed_queries import job_location, job_run, sink_restore
from tidegate.jobs.sealed_queries.batch_sealer import BatchSealer, JobAuthor
from tidegate.jobs.sealed_queries.checkpoint_folder import BucketFolder
from tidegate.jobs.sealed_queries.job_location import JobLocation
from tidegate.jobs.sealed_queries.job_run import JobOptions, JobSession
from tidegate.jobs.sealed_queries.seal_loop import SealLoop
from tidegate.jobs.sealed_queries.sink_restore import (
    SealedPoint,
    choose_rewind,
    find_sink_log,
    restore_sink,
)
from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.loader import load_any_spec, load_spec

SPEC = {"kind": "job", "name": "clicks", "app": "clicks.py"}


@pytest.fixture(autouse=True)
def _without_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_callbacks", {})


@pytest.fixture
def session(tmp_path: Path) -> Iterator[JobSession]:
    """A job that holds its lease and whose script is about to run."""
    yield from _open(tmp_path, SPEC)


def _open(folder: Path, spec: dict[str, Any], name: str = "clicks") -> Iterator[JobSession]:
    script = folder / "clicks.py"
    script.write_text("pass")
    store = MemoryStore()
    lease = Lease.acquire(store, name, ProcessIdentity.this_process())
    made = JobSession(
        JobSpec.model_validate({**spec, "name": name}),
        JobOptions("memory://", script, home=folder),
        store,
        lease,
        f"uid of {name}",
        threading.Event(),
    )
    log = SlotLog(store, name)
    made._location = JobLocation(folder / f"launch-{name}", None, is_first=True)
    sealer = BatchSealer(log, lease, JobAuthor("uid", "digest", "here"), lambda _: None)
    made._loop = SealLoop(sealer, made._reports, made._steps, made._status, made._stop)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (WriterFacts(name="per minute"), "job.bad_query_name"),
        (WriterFacts(name="../etc"), "job.bad_query_name"),
        (WriterFacts(name="q", trigger="continuous"), "job.no_batches"),
        (WriterFacts(name="q", location="s3a://bucket/checkpoint"), "job.remote_checkpoint"),
        (WriterFacts(name="q", location="hdfs://host/checkpoint"), "job.remote_checkpoint"),
    ],
)
def test_a_query_that_cannot_be_sealed(session: JobSession, facts: WriterFacts, code: str) -> None:
    """It is refused before it starts, and named."""
    with pytest.raises(ConfigurationError) as refused:
        session._start_query(facts)
    assert refused.value.code == code
    assert refused.value.advice


@pytest.mark.parametrize("trigger", [None, "processingTime", "availableNow", "once"])
def test_triggers_with_batches(session: JobSession, trigger: str | None) -> None:
    """Also those that end by themselves: the job has finished then."""
    folder = session._start_query(WriterFacts(name="q", trigger=trigger))
    assert folder == str(session._location.folder / "q")
    session._wait_for_queries()
    assert not session._stop.is_set()


def test_the_only_query_without_a_name_gets_that_of_the_job(session: JobSession) -> None:
    """A second one does not."""
    facts = WriterFacts()
    location = session._location.get_folder("clicks").address
    assert session._start_query(facts) == location
    assert facts.name == "clicks"
    with pytest.raises(ConfigurationError) as refused:
        session._start_query(WriterFacts())
    assert refused.value.code == "job.unnamed_query"


def test_a_query_that_spark_begins_anew_is_left_to_spark(session: JobSession) -> None:
    """The sink `memory` takes no checkpoint, unless the mode is `complete`."""
    with capture_logs() as lines:
        assert session._start_query(WriterFacts(name="q", format="memory")) is None
    assert [line["event"] for line in lines] == ["query_not_sealed"]
    start_query(session._reports, "run", "q")
    session._refuse_unseen_queries()
    session._wait_for_queries()
    assert session._loop.error is None
    whole = WriterFacts(name="whole", format="memory", mode="complete")
    assert session._start_query(whole) is not None


def test_a_launch_that_was_taken_over_while_it_slept_leaves_sinks_alone(
    session: JobSession,
) -> None:
    """They are the next driver's by then, so it neither restores one nor starts a query."""
    evict_lease_holder(session._store, "clicks")
    session._steps.lease._valid_until = -1.0
    with pytest.raises(FencedError):
        session._start_query(WriterFacts(name="q"))
    assert not session._loop.queries


def test_two_queries_of_one_name(session: JobSession) -> None:
    """They would write one checkpoint."""
    assert session._start_query(WriterFacts(name="q")) is not None
    with pytest.raises(ConfigurationError, match="second query with the name q"):
        session._start_query(WriterFacts(name="q"))


def test_a_query_outside_the_list_is_left_alone(tmp_path: Path) -> None:
    """It keeps its own checkpoint; one without a name as well."""
    for made in _open(tmp_path, {**SPEC, "queries": ["q"]}):
        assert made._start_query(WriterFacts(name="other", location="/own")) is None
        assert made._start_query(WriterFacts(location="/own")) is None
        folder = made._start_query(WriterFacts(name="q"))
        assert folder == str(made._location.folder / "q")


def test_a_checkpoint_is_adopted_by_one_job(tmp_path: Path) -> None:
    """A second one that goes on from it would write the same batches."""
    own = FakeCheckpoint(tmp_path / "own")
    own.commit(0)
    own.plan(1)
    own.write_state(2)
    facts = WriterFacts(name="q", location=f"file://{own.folder}", session=MagicMock())
    for made in _open(tmp_path, SPEC):
        folder = Path(made._start_query(facts) or "")
        assert not (folder / "state/0/0/2.delta").exists()
        assert (folder / "commits/0").exists()
        assert made._loop.seal_committed(patience=0) == 1
    for made in _open(tmp_path, SPEC, "others"):
        with pytest.raises(ConfigurationError, match="adopted by clicks uid of clicks already"):
            made._start_query(facts)


def test_a_state_of_many_partitions_is_named_once(session: JobSession) -> None:
    """Spark's default of 200 makes 200 files per batch; the advice names the number of cores."""
    for name, partitions in (("wide", 200), ("narrow", 8)):
        session._start_query(WriterFacts(name=name))
        made = FakeCheckpoint(session._location.folder / name, partitions)
        made.commit(0)
        made.commit(1)
    with capture_logs() as lines:
        assert session._loop.seal_committed(patience=0) == 4
    (line,) = [line for line in lines if line["event"] == "many_state_partitions"]
    assert (line["query"], line["partitions"]) == ("wide", 200)
    assert f"spark.sql.shuffle.partitions to {os.cpu_count()}" in line["advice"]


def test_a_repeated_batch_is_read_by_the_reader_of_kafka_that_survives_it(
    session: JobSession, tmp_path: Path
) -> None:
    """SPARK-57438: the newer one fails at its end. A start between two batches changes nothing."""
    made = FakeCheckpoint(session._location.folder / "q")
    made.commit(0)
    spark = MagicMock()
    spark.conf.get.return_value = "org.x.Mine"
    session._start_query(WriterFacts(name="q", session=spark))
    assert not spark.conf.set.called
    made.plan(1)
    session._loop.queries.clear()
    session._start_query(WriterFacts(name="q", session=spark))
    (key, value), _ = spark.conf.set.call_args
    assert key == "spark.sql.streaming.disabledV2MicroBatchReaders"
    assert value == "org.x.Mine,org.apache.spark.sql.kafka010.KafkaSourceProvider"


def test_only_a_query_that_was_sealed_has_its_sink_emptied(
    session: JobSession, tmp_path: Path
) -> None:
    """A query that is new in a job may have a sink that other programs have filled.

    It is not started over that one, because Spark would leave out rows.
    """
    facts = WriterFacts(name="q", format="json", path=str(tmp_path / "out"))
    log = find_sink_log(facts)
    assert log is not None
    log.mkdir(parents=True)
    (log / "0").write_text("v1")
    session._location = JobLocation(tmp_path / "new", None, is_first=False)
    with pytest.raises(ConfigurationError, match="has batch 0 already"):
        session._start_query(facts)
    assert (log / "0").exists()
    (log / "0").unlink()
    session._start_query(facts)
    own = FakeCheckpoint(tmp_path / "new" / "q")
    own.commit(0)
    (log / "0").write_text("v1")  # as Spark does, before it commits the batch
    assert session._loop.seal_committed(patience=0) == 1
    lease, slots = session._steps.lease, session._slot_log
    plan = plan_restore(slots, None)
    commit_restore(slots, lease, plan, request_id="r", who="w", why="y")
    session._loop.queries.clear()
    session._location = JobLocation(tmp_path / "newer", None, is_first=False)
    session._start_query(facts)
    assert not (log / "0").exists()


def test_a_launch_whose_restore_failed_is_not_gone_on_with(
    session: JobSession, tmp_path: Path
) -> None:
    """The next launch on this host would keep a part of the checkpoint, or a sink that is ahead."""
    facts = WriterFacts(name="q", format="kafka")
    session._start_query(facts)
    made = FakeCheckpoint(session._location.folder / "q")
    made.commit(0)
    assert session._loop.seal_committed(patience=0) == 1
    calls: list[int | None] = []

    @job.on_restore("q")
    def take_back(_query: str, batch: int | None) -> None:
        calls.append(batch)
        if len(calls) == 1:
            raise RuntimeError("the sink is away")

    folder = tmp_path / "elsewhere"
    session._location = JobLocation(folder, session._slot_log.head().record, is_first=False)
    session._loop.queries.clear()
    session._store.hook = lambda _: Fault.REFUSED  # type: ignore[attr-defined]
    with pytest.raises(TidegateError):
        session._start_query(facts)
    session._store.hook = None  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="the sink is away"):
        session._start_query(facts)
    assert not (folder / "q").exists()
    session._start_query(facts)
    assert (folder / "q/offsets/0").exists()
    assert calls == [0, 0]
    session._loop.queries.clear()
    session._start_query(facts)
    assert calls == [0, 0]


def test_a_sink_that_no_one_can_read_is_not_taken_over(tmp_path: Path) -> None:
    """The numbers of its batches would mean other rows, unless it may get them twice."""
    for repeatable in ([], ["q"]):
        facts, folder = WriterFacts(name="q", format="foreach"), tmp_path / f"new{len(repeatable)}"
        for made in _open(tmp_path, {**SPEC, "repeatable": repeatable}, f"j{len(repeatable)}"):
            made._start_query(facts)
            FakeCheckpoint(made._location.folder / "q").commit(0)
            assert made._loop.seal_committed(patience=0) == 1
            made._location = JobLocation(folder, made._slot_log.head().record, is_first=False)
            made._loop.queries.clear()
            if repeatable:
                assert made._start_query(facts) is not None
                continue
            with pytest.raises(
                ConfigurationError, match=r"after batch 0 .* have batch 1"
            ) as refused:
                made._start_query(facts)
            assert refused.value.code == "job.sink_unknown"
            assert not (folder / "q").exists()


@pytest.mark.parametrize(
    "master", ["spark://host:7077", "yarn", "k8s://host", "local-cluster[2,1,1024]"]
)
def test_executors_elsewhere(session: JobSession, master: str) -> None:
    """They cannot write the checkpoint folder of this host."""
    spark = MagicMock()
    spark.sparkContext.master = master
    with pytest.raises(ConfigurationError, match="executors elsewhere"):
        session._adopt_session(spark)
    with pytest.raises(ConfigurationError, match="executors elsewhere"):
        session._choose_settings({"spark.master": master})
    with pytest.raises(ConfigurationError, match="Spark Connect"):
        session._adopt_session(object())


def test_executors_elsewhere_reach_the_bucket(session: JobSession, tmp_path: Path) -> None:
    """The next launch gets a new folder, as nothing proves their end; Spark Connect is refused."""
    spark, folder = MagicMock(), tmp_path / "launch"
    spark.sparkContext.master = "spark://host:7077"
    spark.sparkContext._gateway.proc = None
    folder.mkdir()
    store = session._store
    assert isinstance(store, CopyingStore)
    bucket = BucketFolder(store, "clicks/launches/1/")
    session._location = JobLocation(folder, None, is_first=True, bucket=bucket)
    session._adopt_session(spark)
    assert not job_location._have_owners_ended(folder)
    address = session._start_query(WriterFacts(name="q", session=spark))
    assert address == bucket.enter("q").address
    with pytest.raises(ConfigurationError, match="Spark Connect"):
        session._adopt_session(object())


def test_a_local_folder_has_no_bucket(session: JobSession, tmp_path: Path) -> None:
    """The store decides where checkpoints in the bucket could be."""
    spec = JobSpec.model_validate({**SPEC, "checkpoint": {"location": "bucket"}})
    own = (JobOptions("/store", session._options.script, home=tmp_path), LocalStore(tmp_path))
    made = JobSession(spec, *own, session._steps.lease, "uid", threading.Event())
    with pytest.raises(ConfigurationError, match="not in S3"):
        _ = made._location
    made.close()


def test_the_jvm_of_a_script_reads_the_class_archive(
    session: JobSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts sooner after a kill. Options of the script and of spark-defaults.conf follow and win."""
    monkeypatch.setattr(job_run, "build_archive_options", lambda: "-XX:SharedArchiveFile=a")
    given = {"spark.driver.extraJavaOptions": "-Xss2m"}
    for _ in range(2):
        given |= session._choose_settings(given)
    assert given["spark.driver.defaultJavaOptions"] == "-XX:SharedArchiveFile=a"
    assert given["spark.driver.extraJavaOptions"] == "-Xss2m"
    assert "spark.driver.extraJavaOptions" not in session._choose_settings({})


def test_spark_chooses_the_master_of_a_script_that_names_none(session: JobSession) -> None:
    """That of spark-defaults.conf counts, as without tidegate."""
    assert "spark.master" not in session._choose_settings({})


def test_what_comes_from_the_environment_reaches_script_and_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spec in the bucket has its name only, and Spark masks the setting."""
    monkeypatch.setenv("KEY", "k3y")
    given = {"args": ["--key", "env:KEY", 5], "conf": {"spark.my.key": "env:KEY", "spark.n": True}}
    for made in _open(tmp_path, {**SPEC, **given}):
        made._options.script.write_text("import sys; assert sys.argv[1:] == ['--key', 'k3y', '5']")
        made._run_script()
        for own in ({}, {"spark.redaction.regex": "mine"}):
            chosen = made._choose_settings({**own, **made._choose_settings(own)})
            assert (chosen["spark.my.key"], chosen["spark.n"]) == ("k3y", "true")
            masked = re.compile(chosen["spark.redaction.regex"])
            assert masked.search("spark.my.key")
            assert masked.search("mine" if own else "my.Password")
        assert made._secrets == ["spark.my.key"]
        assert "k3y" not in made._spec.model_dump_json()


def test_an_error_of_the_script_shows_no_secret_of_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the spec tells that the value is one."""
    monkeypatch.setattr("tidegate.secret_masks._hidden", set())
    monkeypatch.setenv("KEY", "hunter-forty-two")
    for made in _open(tmp_path, {**SPEC, "args": ["env:KEY"]}):
        made._options.script.write_text("import sys; raise ValueError('no table ' + sys.argv[1])")
        with pytest.raises(ValueError, match="no table") as failed:
            made._run_script()
        assert made._classify(failed.value).message == "clicks: the script failed: no table ***"


def test_a_variable_of_the_environment_is_missing(tmp_path: Path) -> None:
    """The field is named before Spark starts."""
    with pytest.raises(ConfigurationError, match=r"conf\.spark\.my\.key: .* NO_SUCH_KEY"):
        next(_open(tmp_path, {**SPEC, "conf": {"spark.my.key": "env:NO_SUCH_KEY"}}))


def test_the_folder_of_a_job_is_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are in its files. An older folder is closed as well."""
    monkeypatch.setattr(LeaderElection, "wait_until_wanted", lambda _: False)
    spec = JobSpec.model_validate({**SPEC, "name": "clicks"})
    options = JobOptions(str(tmp_path / "store"), tmp_path / "s.py", home=tmp_path / "jobs")
    (tmp_path / "jobs" / "clicks").mkdir(parents=True)
    job_run.run_job_until_end(spec, options)
    assert (tmp_path / "jobs" / "clicks").stat().st_mode & 0o777 == 0o700


def test_spark_connect_is_refused_before_it_starts(
    session: JobSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a setting, or by the environment."""
    with pytest.raises(ConfigurationError, match="Spark Connect"):
        session._choose_settings({"spark.remote": "sc://host"})
    monkeypatch.setenv("SPARK_REMOTE", "local")
    with pytest.raises(ConfigurationError, match="Spark Connect"):
        session._choose_settings({})


def test_a_script_without_a_query(session: JobSession) -> None:
    """It ended at once: the job is not green."""
    with pytest.raises(ConfigurationError, match="none of the queries with a name"):
        session._wait_for_queries()


@pytest.mark.parametrize("text", ["raise ValueError('no such page')", "import sys; sys.exit(3)"])
def test_a_script_that_fails(session: JobSession, text: str) -> None:
    """Its error is a poison: a person has to look."""
    session._options.script.write_text(text)
    with pytest.raises(Exception, match=r"no such page|3") as failed:
        session._run_script()
    reported = session._classify(failed.value)
    assert isinstance(reported, TidegateError)
    assert (reported.code, reported.failure_class) == ("job.script_failed", FailureClass.POISON)


def test_a_script_that_ends_with_zero_has_not_failed(session: JobSession) -> None:
    """Nor one that returns; it sees its own arguments."""
    session._options.script.write_text("import sys; assert len(sys.argv) == 1; sys.exit(0)")
    session._run_script()


def test_a_query_that_scala_code_starts(tmp_path: Path) -> None:
    """Its batches would not be sealed, so the job ends; one that the list leaves out may run."""
    for made in _open(tmp_path, {**SPEC, "queries": ["q"]}):
        made._start_query(WriterFacts(name="q"))
        for run, name in (("a", "q"), ("b", "other"), ("c", None)):
            start_query(made._reports, run, name)
        made._refuse_unseen_queries()
        assert not made._stop.is_set()
    for made in _open(tmp_path, SPEC):
        start_query(made._reports, "a", "scala")
        made._refuse_unseen_queries()
        assert made._loop.error is not None
        assert made._loop.error.code == "job.unseen_query"
        assert made._stop.is_set()


def test_a_query_that_fails_ends_the_job(session: JobSession) -> None:
    """Also if the script waits for another query and never looks."""
    session._start_query(WriterFacts(name="q"))
    start_query(session._reports, "run", "q")
    end_query(session._reports, "run", "org.x: bad\n at y\nCaused by: java.io.IOException: gone")
    session._loop.check_queries()
    assert session._stop.is_set()
    assert session._loop.error is not None
    assert session._loop.error.message == "clicks: query q failed: java.io.IOException: gone"
    with pytest.raises(SystemExit):
        session._start_query(WriterFacts(name="later"))


_SDK = "put on b/1.delta: software.amazon.awssdk.core.exception"


# What hadoop-aws 3.4.2 makes of errors of the SDK: a refused connection, one that breaks, and so on.
# The last comes from Spark, on a host that is too busy to start Python.
@pytest.mark.parametrize(
    "gone",
    [
        f"java.net.ConnectException: {_SDK}.SdkClientException: Unable to execute HTTP request: x: y",
        f"java.net.SocketException: {_SDK}.SdkClientException: Unable to execute HTTP request: reset",
        f"org.apache.hadoop.fs.s3a.AWSApiCallTimeoutException: {_SDK}.ApiCallTimeoutException: late",
        "org.apache.hadoop.fs.s3a.HttpChannelEOFException: put on b/1.delta: no response",
        "org.apache.hadoop.fs.s3a.AWSStatus500Exception: put on b/1.delta: 502",
        "java.net.SocketTimeoutException: Timed out while waiting for the Python worker to connect back",
    ],
)
def test_what_spark_waited_for_in_vain_is_no_fault_of_the_script(
    session: JobSession, gone: str
) -> None:
    """A bucket or a Python worker: another launch can help, also if it was at a start."""
    session._start_query(WriterFacts(name="q"))
    start_query(session._reports, "run", "q")
    end_query(session._reports, "run", f"org.x: bad\n at y\nCaused by: {gone}")
    started = session._classify(
        RuntimeError(f"An error occurred while calling o1.start.\n: {gone}")
    )
    assert started.failure_class is FailureClass.TRANSIENT
    assert "in the script" in started.message
    session._loop.check_queries()
    assert session._loop.error is not None
    assert session._loop.error.failure_class is FailureClass.TRANSIENT
    assert gone[-20:] in session._loop.error.message


def test_a_script_that_does_not_start_its_queries_is_stalled(tmp_path: Path) -> None:
    """Those that the spec names, or else any; the time is that of the spec."""
    for names, started in (([], []), (["p", "q"], ["q"])):
        for made in _open(tmp_path, {**SPEC, "queries": names, "start_within": "1h"}):
            for name in started:
                made._start_query(WriterFacts(name=name))
            made._refuse_stalled_start()
            assert made._loop.error is None
            made._began -= 3601
            made._refuse_stalled_start()
            assert made._loop.error is not None
            assert made._loop.error.code == "job.start_stalled"
            assert made._loop.error.failure_class is FailureClass.TRANSIENT


def test_a_job_that_has_started_its_queries_is_not_stalled(session: JobSession) -> None:
    """However long ago that was."""
    session._start_query(WriterFacts(name="q"))
    session._began -= 1e6
    session._refuse_stalled_start()
    assert session._loop.error is None


def test_a_jvm_that_ends_ends_the_job(session: JobSession) -> None:
    """Also if the script sleeps and never looks at its queries."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    spark = MagicMock()
    spark.sparkContext.master, spark.sparkContext._gateway.proc = "local[2]", process
    session._location.folder.mkdir()
    session._adopt_session(spark)
    session._refuse_lost_jvm()
    assert session._loop.error is None
    with process:
        process.kill()
    session._refuse_lost_jvm()
    assert session._loop.error is not None
    assert session._loop.error.failure_class.exit_code == 3


class Ended:
    """A query of PySpark that has ended: with this error, or its JVM gives this one."""

    def __init__(self, failure: Exception | None = None, lost: Exception | None = None) -> None:
        self._failure, self._lost = failure, lost

    def exception(self) -> Exception | None:
        """Tell how it ended."""
        if self._lost is not None:
            raise self._lost
        return self._failure


_LOST_RACE = RuntimeError("x: Race while writing batch 2")


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (Ended(_LOST_RACE), 3),
        (Ended(RuntimeError("12,50 is no number")), 1),
        (Ended(lost=ConnectionRefusedError("111")), 3),
    ],
)
@pytest.mark.parametrize("text", ["raise KeyError('mine')", "import sys; sys.exit(7)", "pass"])
def test_what_spark_reports_decides_how_a_job_ends(
    session: JobSession, text: str, ended: Ended, code: int
) -> None:
    """Whatever the script makes of the end of its query."""
    facts = WriterFacts(name="q")
    session._start_query(facts)
    facts.query = ended
    session._options.script.write_text(text)
    with pytest.raises(Exception) as failed:  # noqa: PT011 - classified below
        session._run_until_ended()
    assert session._classify(failed.value).failure_class.exit_code == code


def test_a_query_that_has_lost_a_race_begins_from_what_is_sealed(session: JobSession) -> None:
    """The next launch would leave out the batch, which is in the sink's log with other rows."""
    raced, other = (FakeCheckpoint(session._location.folder / name) for name in ("q", "other"))
    facts = WriterFacts(name="q")
    session._start_query(facts)
    facts.query = Ended(_LOST_RACE)
    with pytest.raises(TransientError, match="Race while writing"):
        session._run_until_ended()
    assert not raced.folder.exists()
    assert other.folder.exists()


@pytest.mark.parametrize("text", ["raise KeyError('mine')", "import sys; sys.exit(7)", "pass"])
def test_a_stop_has_the_same_end_whatever_the_script_makes_of_it(
    session: JobSession, text: str
) -> None:
    """Exit code 0, and stopped."""
    facts = WriterFacts(name="q")
    session._start_query(facts)
    facts.query = Ended()
    install = "import signal; signal.signal(signal.SIGTERM, lambda *_: None)"
    session._options.script.write_text(f"{install}; signal.raise_signal(signal.SIGTERM); {text}")
    with stop_on_signals(session._stop):
        assert session._run_until_ended().state == "stopped"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"app": "clicks.jar"}, "app: a job runs a PySpark script.*Scala or Java; found"),
        ({"queries": ["a", "a"]}, "twice"),
        ({"queries": ["a"], "repeatable": ["b"]}, "not one of the queries"),
        ({"queries": ["a b"]}, "queries"),
        (
            {"supervision": {"submit": {}}, "conf": {"spark.master": "local"}},
            "conf: spark.master is that of the connection",
        ),
        ({"sources": {}}, "unknown field"),
    ],
)
def test_a_bad_spec(tmp_path: Path, change: dict[str, Any], what: str) -> None:
    """A Scala job, two queries of one name, a launch on a cluster: the line is named."""
    path = tmp_path / "job.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in {**SPEC, **change}.items()))
    with pytest.raises(ConfigurationError, match=what) as refused:
        load_any_spec(path)
    assert f"{path}:" in refused.value.message


def test_a_job_where_a_pipeline_is_meant(tmp_path: Path) -> None:
    """Commands for pipelines say so."""
    path = tmp_path / "job.yaml"
    path.write_text("{kind: job, name: clicks, app: clicks.py}")
    with pytest.raises(ConfigurationError, match="is a job"):
        load_spec(path)
    with pytest.raises(ConfigurationError, match=r"no script clicks\.py"):
        job_run.require_script(load_any_spec(path), path.parent / "nowhere.py")  # type: ignore[arg-type]


def test_how_a_sink_follows(tmp_path: Path) -> None:
    """A function of the script wins; a file sink here has a log, a table of Iceberg or Delta its commits."""

    def rewind(**said: Any) -> SinkRewind:
        return choose_rewind(WriterFacts(name="q", **said), repeatable=False)

    assert rewind(path=str(tmp_path)) is SinkRewind.LOG
    assert rewind(path="s3a://bucket/out") is SinkRewind.REFUSED
    assert rewind(format="kafka") is SinkRewind.REFUSED
    assert rewind(format="table") is SinkRewind.REFUSED
    assert rewind(format="iceberg", path="db.table") is SinkRewind.ROLLBACK
    assert rewind(format="delta", path=str(tmp_path)) is SinkRewind.ROLLBACK
    assert rewind(format="delta", table="t") is SinkRewind.REFUSED
    assert rewind(format="console") is SinkRewind.REPEAT
    for topic, expected in ((None, SinkRewind.REPEAT), ("t", SinkRewind.ANNOUNCE)):
        facts = WriterFacts(name="q", format="kafka", topic=topic)
        assert choose_rewind(facts, repeatable=True) is expected
    job.on_restore("q")(lambda _query, _batch: None)
    assert rewind(format="kafka") is SinkRewind.CALLBACK


def test_the_log_of_a_file_sink_becomes_the_sealed_one(tmp_path: Path) -> None:
    """Entries of later batches go, also compacted ones; Spark then writes these batches again."""
    facts = WriterFacts(name="q", format="json", path=str(tmp_path / "out"))
    live, sealed = find_sink_log(facts), tmp_path / "checkpoint" / "_sink"
    assert live is not None
    for folder, names in ((live, ["8", "9.compact", "10", ".10.crc"]), (sealed, ["7", "8"])):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text(f"{folder.name} {name}")
    restore_sink(facts, sealed.parent, SealedPoint("clicks", frozenset(), 8), SinkRewind.LOG)
    assert {path.name: path.read_text() for path in live.iterdir()} == {
        "7": "_sink 7",
        "8": "_sink 8",
    }


def test_the_script_takes_batches_back() -> None:
    """The function gets the query and the last batch that stays; None at the beginning."""
    calls: list[tuple[str, int | None]] = []
    job.on_restore()(lambda query, batch: calls.append((query, batch)))
    facts = WriterFacts(name="q", format="kafka")
    for batch in (4, None):
        point = SealedPoint("clicks", frozenset(), batch)
        restore_sink(facts, Path("/none"), point, SinkRewind.CALLBACK)
    assert calls == [("q", 4), ("q", None)]


def test_the_readers_of_a_topic_are_informed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the message of a pipeline's sink; a topic that does not take it is named."""
    sent: list[dict[str, Any]] = []

    def write(_session: Any, messages: Any, options: dict[str, Any]) -> None:
        if sent:
            raise PySparkException("x\nCaused by: InvalidRecordException: without key")
        sent.append({**messages.to_pylist()[0], "options": options})

    monkeypatch.setattr(sink_restore, "write_messages", write)
    facts = WriterFacts(name="q", format="kafka")
    facts.note_options(topic="t", **{"KAFKA.bootstrap.servers": "a:1, b:2", "path": "/x"})
    assert facts.find_topic() == "kafka://a:1/t"
    point = SealedPoint("clicks", frozenset(), 4, "", {}, {"uid": "u", "timeline": 1})
    restore_sink(facts, Path("/none"), point, SinkRewind.ANNOUNCE)
    (message,) = sent
    assert (message["topic"], message["key"], message["value"]) == ("t", None, None)
    assert message["options"] == {"kafka.bootstrap.servers": "a:1, b:2"}
    headers = {one["key"]: json.loads(one["value"]) for one in message["headers"][1:]}
    assert headers["tidegate-restore"] == {**point.notice, "query": "q", "after_batch": 4}
    with pytest.raises(TransientError, match="topic t of query q") as refused:
        restore_sink(facts, Path("/none"), point, SinkRewind.ANNOUNCE)
    assert "without key" in refused.value.message


def test_validate_takes_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside pipelines; a run refuses what only pipelines have."""
    path = tmp_path / "job.yaml"
    path.write_text("{kind: job, name: clicks, app: clicks.py}")
    run_command("validate", str(path))
    assert "the job clicks is valid" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="is a job"):
        run_command("run", str(path), "--epochs", "3")


def run_command(*arguments: str) -> None:
    """Run a command of tidegate in this process."""
    with patch.dict("os.environ", {"TIDEGATE_DEBUG": "1"}):
        app(list(arguments), standalone_mode=False)
