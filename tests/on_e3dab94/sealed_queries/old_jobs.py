"""What own jobs did in commit e3dab94, by its own names: each test says what should have held."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from pyspark import SparkContext
from tests.sealed_queries.conftest import JobBench
from tests.sealed_queries.fake_events import start_query
from typer.testing import CliRunner

from tidegate.checkpoints.batch_notes import BatchReport, SinkRewind
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_identity import ProcessIdentity, ensure_identity
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TidegateError
from tidegate.jobs.cli.main import app
from tidegate.jobs.driver.pipeline_run import stop_on_signals
from tidegate.jobs.sealed_queries import seal_loop
from tidegate.jobs.sealed_queries.batch_sealer import BatchSealer, JobAuthor
from tidegate.jobs.sealed_queries.job_run import JobOptions, JobSession
from tidegate.jobs.sealed_queries.seal_loop import SealLoop, SparkReports
from tidegate.jobs.sealed_queries.sink_restore import SealedPoint, TableCommit, choose_commit
from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts, install_hooks
from tidegate.jobs.spec.job_spec import JobSpec


class _Query:
    """A query of PySpark that has ended, with this error."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def exception(self) -> Exception | None:
        return self._error


def _open_session(
    bench: JobBench, stop: threading.Event | None = None, script: str = "", **spec: Any
) -> JobSession:
    """A job that holds the lease, and has not begun."""
    bench.folder.mkdir(exist_ok=True)
    file = bench.folder / "clicks.py"
    file.write_text(script)
    options = JobOptions(store_url="memory", script=file, home=bench.folder / "home")
    given = JobSpec.model_validate({"kind": "job", "name": "clicks", "app": str(file), **spec})
    return JobSession(given, options, bench.store, bench.lease, "uid", stop or threading.Event())


def _run(bench: JobBench, query: _Query, spark: Any, **given: Any) -> str:
    """Run a script that has started one query; return the state in which the job ends."""
    session = _open_session(bench, **given)
    sealed, _ = bench.query("q")
    sealed.facts.query = query
    session._loop.queries["q"] = sealed
    session._sessions.append(spark)
    try:
        return session._run().state
    except TidegateError:
        return "failed"
    finally:
        session.close()


def _make_spark(**streams: Any) -> Any:
    spark = MagicMock()
    spark.streams.active = []
    return spark


def test_jobs_f1(bench: JobBench) -> None:
    """A job whose JVM was killed has not finished."""

    class Gone:
        @property
        def streams(self) -> Any:
            raise ConnectionRefusedError("111")

    assert _run(bench, _Query(), Gone()) != "finished"


def test_jobs_f2(bench: JobBench) -> None:
    """A job whose script passes over a failed query has failed."""
    failed = _Query(ValueError("12,50 is no number"))
    assert _run(bench, failed, _make_spark()) == "failed"


def test_ops_v7(bench: JobBench) -> None:
    """A job whose script stops an unbounded query has not finished."""
    assert _run(bench, _Query(), _make_spark()) == "failed"


def test_jobs_f9(bench: JobBench) -> None:
    """A handler of the script does not replace the stop."""
    stop = threading.Event()
    script = (
        "import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    with stop_on_signals(stop):
        assert _run(bench, _Query(), _make_spark(), stop=stop, script=script) == "stopped"


def test_ops_x2(bench: JobBench) -> None:
    """The stored spec of a job holds no secret."""
    conf = {"spark.ssl.keyPassword": "hunter2"}
    _run(bench, _Query(), _make_spark(), conf=conf, args=["--token=hunter2"])
    (stored,) = bench.store.list_objects("clicks/specs/")
    assert b"hunter2" not in bench.store.get(stored.key).data


def test_ops_v5(bench: JobBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query that hangs before its batch is planned is stalled."""
    monkeypatch.setitem(seal_loop.STEP_DEADLINES, "move", -1.0)
    reports = SparkReports()
    loop = SealLoop(bench.sealer, reports, MagicMock(), MagicMock(), threading.Event())
    query, _ = bench.query("q")
    query.facts.query = MagicMock(isActive=True, status={"isTriggerActive": True})
    loop.queries["q"] = query
    start_query(reports, "run", "q")
    assert [_find_stall(loop), _find_stall(loop)] == [None, "job.batch_stalled"]


def _find_stall(loop: SealLoop) -> str | None:
    try:
        loop._refuse_stalled_batch()
    except TidegateError as error:
        return error.code
    return None


def _start_over_log(bench: JobBench, *names: str) -> str | None:
    """Start a query over a file sink whose log has these entries, in a new folder."""
    session = _open_session(bench)
    log = bench.folder / "out" / "_spark_metadata"
    log.mkdir(parents=True)
    for name in names:
        (log / name).touch()
    facts = WriterFacts(name="q", path=str(log.parent), format="parquet", session=MagicMock())
    try:
        session._start_query(facts)
    except TidegateError as error:
        return error.code
    finally:
        session.close()
    return None


def test_jobs_f3(bench: JobBench) -> None:
    """A query that begins anew does not start over a file sink that is ahead."""
    assert _start_over_log(bench, "0", "8") is not None


def test_core_c22(bench: JobBench) -> None:
    """Nor a new folder before a first batch was sealed: Spark would skip batch 0."""
    assert _start_over_log(bench, "0") is not None


def test_jobs_f4(bench: JobBench) -> None:
    """A JVM does not outlive the lease of a driver whose Python is stopped."""
    jvm = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    store = bench.folder / "store"
    script = f"""
import sys, threading
from pathlib import Path
from unittest.mock import MagicMock
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.jobs.sealed_queries import job_run
from tidegate.jobs.spec.job_spec import JobSpec
job_run.get_jvm_pid = lambda _: {jvm.pid}
store = LocalStore(Path({str(store)!r}))
app = Path({str(bench.folder / "clicks.py")!r})
app.write_text("")
spec = JobSpec.model_validate({{"kind": "job", "name": "clicks", "app": str(app)}})
options = job_run.JobOptions(store_url="x", script=app, home=app.parent / "home")
lease = Lease.acquire(store, "clicks", ProcessIdentity.this_process())
job = job_run.JobSession(spec, options, store, lease, "uid", threading.Event())
spark = MagicMock()
spark.sparkContext.master = "local[1]"
job._adopt_session(spark)
print("adopted", flush=True)
sys.stdin.read()
"""
    bench.folder.mkdir(exist_ok=True)
    driver = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert driver.stdout is not None
        assert b"adopted\n" in iter(driver.stdout.readline, b"")
        driver.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            driver.wait(10.0)  # longer than the lease of 6 s
        assert jvm.poll() is not None
    finally:
        driver.kill()
        jvm.kill()
        driver.communicate()
        jvm.wait()


def _seal(bench: JobBench, batches: int, rewind: SinkRewind = SinkRewind.REPEAT) -> None:
    query, made = bench.query("q", rewind)
    for batch in range(batches):
        made.commit(batch)
        bench.sealer.seal(query, batch, BatchReport())


def _restore(bench: JobBench, target: Any, request: str) -> None:
    plan = plan_restore(bench.log, target)
    commit_restore(bench.log, bench.lease, plan, request_id=request, who="ann", why="a mistake")


def _list_ids(bench: JobBench) -> frozenset[str] | str:
    """The ids of the query that the next launch finds, or its error."""
    session = _open_session(bench)
    try:
        return session._list_query_ids("q")
    except (TidegateError, LookupError, ValueError) as error:
        return repr(error)
    finally:
        session.close()


def test_core_c11(bench: JobBench) -> None:
    """A second restore right after one to the beginning does not end the next launch."""
    _seal(bench, 3)
    newest = bench.sealed[-1].id
    _restore(bench, None, "a")
    _restore(bench, newest, "b")
    assert isinstance(_list_ids(bench), frozenset)


def test_core_c3(bench: JobBench) -> None:
    """What a restore owes to a sink outlives the batches that were left."""
    _seal(bench, 5, SinkRewind.LOG)
    _restore(bench, None, "a")
    session = _open_session(bench)
    owed = session._list_query_ids("q")
    assert owed
    policy = RetentionPolicy(keep_last=1, keep_for=0, grace=0)
    assert Retention(bench.log, policy, external=list).run().retired
    found = session._list_query_ids("q")
    session.close()
    assert found == owed


def test_jobs_f6(tmp_path: Path) -> None:
    """A spec that declares a sink repeatable counts for a restore; the failed job seals no more."""
    store = LocalStore(tmp_path / "store")
    log = SlotLog(store, "clicks")
    ensure_identity(store, "clicks")
    lease = Lease.acquire(store, "clicks", ProcessIdentity.this_process())
    sealed: list[Manifest] = []
    author = JobAuthor("uid", "digest", "host:/folder")
    bench = JobBench(tmp_path / "job")
    query, made = bench.query("q", SinkRewind.REFUSED)
    sealer = BatchSealer(log, lease, author, sealed.append)
    for batch in range(2):
        made.commit(batch)
        sealer.seal(query, batch, BatchReport())
    lease.release()
    spec = tmp_path / "clicks.yaml"
    spec.write_text("kind: job\nname: clicks\napp: clicks.py\nrepeatable: [q]\n")
    (tmp_path / "clicks.py").write_text("")
    words = ["checkpoints", "restore", str(spec), str(sealed[0].id), "--why", "a mistake", "--yes"]
    done = CliRunner().invoke(app, [*words, "--store", str(tmp_path / "store")])
    assert "restore.sink" not in done.output
    assert done.exit_code == 0, done.output


def test_jobs_f10() -> None:
    """A context that the script makes gets the settings of the job."""

    def prepare(builder: Any) -> None:
        builder.config("spark.cores.max", "2")

    with (
        patch.object(SparkContext, "_ensure_initialized") as launch,
        patch.object(SparkContext, "_do_init") as begin,
        install_hooks(prepare, lambda _: None, lambda _: None),
    ):
        SparkContext(master="local[1]", appName="theirs")
    given = [one for call in begin.call_args_list for one in call.args]
    launched = [call.kwargs.get("conf") for call in launch.call_args_list]
    known = [one for one in (*given, *launched) if hasattr(one, "get")]
    assert "2" in [one.get("spark.cores.max", None) for one in known], "no settings of the job"


def test_core_c17(bench: JobBench) -> None:
    """A batch is not sealed if the log of its file sink has batches of another driver."""
    log = bench.folder / "out" / "_spark_metadata"
    log.mkdir(parents=True)
    for name in ("0", "46"):
        (log / name).write_text("v1")
    loop = SealLoop(bench.sealer, SparkReports(), MagicMock(), MagicMock(), threading.Event())
    query, made = bench.query("q")
    query.facts.path, query.facts.format = str(log.parent), "parquet"
    made.commit(0)
    loop.queries["q"] = query
    loop._guard(lambda: bool(loop.seal_committed(patience=0)) and False)
    assert bench.sealed == []


def test_core_c19() -> None:
    """The commit of the sealed batch is chosen, though the clock was set back before its seal."""
    known = [TableCommit(n, at, "q", n) for n, at in enumerate((80, 90, 102))]
    chosen = choose_commit(known, known, SealedPoint("clicks", frozenset({"q"}), 2, 95_000))
    assert chosen is not None
    assert chosen.batch == 2
