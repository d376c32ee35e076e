"""Drivers are submitted by the Spark provider's hook, in a process that lives as long.

Spark's own parser reads the lines, without a cluster.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import structlog
from airflow.providers.apache.spark.hooks import spark_submit

from tidegate.errors import ConfigurationError, FailureClass
from tidegate.jobs.spec.loader import load_any_spec
from tidegate.jobs.spec.operations import SubmitSpec
from tidegate.operators import spark_submission
from tidegate.operators.driver_launch import launch_driver
from tidegate.operators.factory import build_dags
from tidegate.operators.recover_and_pin import RecoverOperator
from tidegate.operators.spark_submission import submit_driver
from tidegate.operators.store_access import StoreAccess
from tidegate.operators.stream_operator import StreamOperator

SPEC = """\
apiVersion: tidegate/v1
name: p
sources:
  one: {path: inbox/one, schema: {at: timestamp}, event_time: at, lag: 1m}
spark: {driver_memory: 1g, jvm: quick, conf: {spark.sql.shuffle.partitions: "8"}}
sinks:
  out: {kind: kafka, servers: "b:9092", topic: out, options: {sasl.jaas.config: "env:KAFKA_JAAS"}}
  db: {kind: postgres, url: "postgresql://me:${DB_PASSWORD}@db/shop"}
supervision: {submit: {conn_id: cluster, py_files: [/opt/tidegate.whl], conf: {spark.executor.memory: 2g}}}
"""
JAAS = 'PlainLoginModule required password="a\\b";'
KEYS = {"TIDEGATE_S3_SECRET_KEY": "do-not-tell", "TIDEGATE_S3_ACCESS_KEY": "who"}
INHERITED = {
    "KAFKA_JAAS": JAAS,
    "DB_PASSWORD": "nor-this",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://o",
    "AWS_CA_BUNDLE": "/ca",
    "AIRFLOW__CORE__FERNET_KEY": "nor-that",
}
ARGUMENTS = ["--store", "s3://lake", "--recover-to", "latest"]
MASTERS: dict[str, tuple[str, str, int | None, dict[str, str]]] = {
    "standalone": ("spark", "spark://10.0.0.1", 7077, {}),
    "local": ("spark", "local[2]", None, {}),
    "yarn-client": ("spark", "yarn", None, {"deploy-mode": "client", "queue": "streams"}),
    "yarn-cluster": ("spark", "yarn", None, {"deploy-mode": "cluster", "queue": "streams"}),
    "k8s": (
        "spark",
        "k8s://https://10.0.0.2",
        6443,
        {"deploy-mode": "cluster", "namespace": "streams"},
    ),
}
# The hook leaves the pipe of spark-submit to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# Writes down its arguments and environment, and ends with the code that the test gives.
PROGRAM = f"""#!{sys.executable}
import json, os, sys
json.dump([sys.argv, dict(os.environ)], open(os.environ["SEEN"], "w"))
print('{{"event": "driver log"}}', file=sys.stderr)
print("exit code: " + os.environ.get("CODE", "0"))
sys.exit(int(os.environ.get("CODE", 0)))
"""

Submit = Callable[..., tuple[int, list[str], dict[str, str]]]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """The pipeline's file."""
    file = tmp_path / "p.yaml"
    file.write_text(SPEC)
    return file


@pytest.fixture
def submit(spec: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submit]:
    """Submit to a master: exit code, and the arguments and environment of spark-submit."""
    program, seen = spec.parent / "spark-submit", spec.parent / "seen.json"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setattr(spark_submission, "_list_program_folders", lambda _: str(spec.parent))
    # The Kubernetes provider is not installed here; building the line asks nothing of it.
    monkeypatch.setattr(spark_submit, "kube_client", object(), raising=False)
    monkeypatch.setenv("TIDEGATE_STORE", "s3://lake")
    monkeypatch.setenv("SEEN", str(seen))
    for name, value in {**KEYS, **INHERITED}.items():
        monkeypatch.setenv(name, value)

    before = structlog.get_config()
    monkeypatch.setenv("_AIRFLOW__AS_LIBRARY", "1")

    def call(name: str, **conf: str) -> tuple[int, list[str], dict[str, str]]:
        _connect(monkeypatch, *MASTERS[name])
        upload = {"spark.kubernetes.file.upload.path": "s3a://lake/submitted"}
        options = SubmitSpec(
            conn_id="cluster",
            py_files=("/opt/tidegate.whl",),
            conf={"spark.executor.memory": "2g", **(upload if name == "k8s" else {}), **conf},
        )
        code = submit_driver(spec.parent / uuid.uuid4().hex, options, spec, ARGUMENTS)
        line, environment = json.loads(seen.read_text())
        return code, line, environment

    yield call
    structlog.configure(**before)


def _connect(
    monkeypatch: pytest.MonkeyPatch, kind: str, host: str, port: int | None, extra: dict[str, str]
) -> None:
    found = {"conn_type": kind, "host": host, "port": port, "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(found))


def _after(line: list[str], option: str) -> list[str]:
    return [value for name, value in pairwise(line) if name == option]


@pytest.mark.parametrize("name", MASTERS)
def test_no_key_is_an_argument(submit: Submit, name: str) -> None:
    """The line has master, memory, settings and packages, but never the store's keys."""
    code, line, environment = submit(name)
    assert code == 0
    assert _after(line, "--master")[0].startswith(MASTERS[name][1])
    assert _after(line, "--py-files") == ["/opt/tidegate.whl"]
    conf = set(_after(line, "--conf"))
    assert {"spark.sql.shuffle.partitions=8", "spark.executor.memory=2g"} <= conf
    assert line[-4:] == ARGUMENTS
    assert not {"do-not-tell", "nor-this"} & set(" ".join(line).split())
    assert environment["TIDEGATE_S3_SECRET_KEY"] == "do-not-tell"
    assert [variable for variable in environment if "AIRFLOW" in variable] == []


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("yarn-cluster", "spark.yarn.appMasterEnv"), ("k8s", "spark.kubernetes.driverEnv")],
)
def test_a_driver_elsewhere_gets_its_keys_privately(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, prefix: str
) -> None:
    """In a properties file that only its owner reads, behind the site's defaults.

    The spec travels along.
    """
    (tmp_path / "spark-defaults.conf").write_text("spark.eventLog.enabled true")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    _, line, _ = submit(name)
    (file,) = _after(line, "--properties-file")
    found = dict(line.split(" ", 1) for line in Path(file).read_text().splitlines())
    assert found["spark.eventLog.enabled"] == "true"
    assert found[f"{prefix}.TIDEGATE_S3_SECRET_KEY"] == "do-not-tell"
    assert found[f"{prefix}.KAFKA_JAAS"] == JAAS.replace("\\", "\\\\")
    assert found[f"{prefix}.DB_PASSWORD"] == "nor-this"
    assert {f"{prefix}.{name}" for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "AWS_CA_BUNDLE")} < set(
        found
    )
    assert f"{prefix}.HOME" not in found
    assert Path(file).stat().st_mode & 0o777 == 0o600
    (copy,) = map(Path, _after(line, "--files"))
    assert load_any_spec(copy) == load_any_spec(tmp_path / "p.yaml")
    assert line[-5] == copy.name


def test_a_driver_here_has_the_jvm_of_its_spec(submit: Submit) -> None:
    """spark-submit starts the JVM, so its options are in the line; the driver runs this Python."""
    _, line, environment = submit("local", **{"spark.driver.extraJavaOptions": "-Dmine=1"})
    (options,) = (part for part in _after(line, "--conf") if "extraJavaOptions" in part)
    assert options.endswith("-Xms256m -XX:+UseSerialGC -Dmine=1")
    # No other host has to reach it.
    assert "spark.driver.bindAddress=127.0.0.1" in _after(line, "--conf")
    assert "spark.driver.bindAddress=127.0.0.1" not in _after(submit("standalone")[1], "--conf")
    assert environment["PYSPARK_PYTHON"] == sys.executable


@pytest.mark.parametrize("code", [0, 1, 3, 137])
@pytest.mark.parametrize("master", ["local", "k8s"])
def test_the_driver_s_exit_code_is_kept(
    submit: Submit, monkeypatch: pytest.MonkeyPatch, master: str, code: int
) -> None:
    """Supervision judges by it."""
    monkeypatch.setenv("CODE", str(code))
    assert submit(master)[0] == code


def test_a_standalone_master_takes_no_python_driver(
    submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before Spark would say it, with what to change."""
    monkeypatch.setitem(
        MASTERS, "cluster", ("spark", "spark://h", 7077, {"deploy-mode": "cluster"})
    )
    with pytest.raises(ConfigurationError, match="takes no Python driver"):
        submit("cluster")


def test_kubernetes_fetches_the_program_from_somewhere(
    spec: Path, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before a driver's pod would fail for it."""
    _connect(monkeypatch, *MASTERS["k8s"])
    with pytest.raises(ConfigurationError, match=r"spark\.kubernetes\.file\.upload\.path"):
        submit_driver(spec.parent / "x", SubmitSpec(conn_id="cluster"), spec, ARGUMENTS)


JOB = """\
kind: job
name: p
app: clicks.py
conf: {spark.sql.shuffle.partitions: "8"}
checkpoint: {location: bucket}
supervision: {submit: {conn_id: cluster}}
"""


def test_a_job_is_submitted_with_its_settings(spec: Path, submit: Submit) -> None:
    """Its own driver runs, with the jars of its checkpoints in the bucket and its `conf`."""
    spec.write_text(JOB)
    _, line, _ = submit("local")
    settings = _after(line, "--conf")
    assert "spark.sql.shuffle.partitions=8" in settings
    assert any("hadoop-aws" in one for one in settings)
    assert _after(line, "--driver-memory") == ["1g"]
    (app,) = (part for part in line if part.endswith(".app.py"))
    assert "tidegate.jobs.sealed_queries" in Path(app).read_text()
    assert line[-5:] == [str(spec), *ARGUMENTS]


@pytest.mark.parametrize("master", ["yarn-cluster", "k8s"])
def test_the_driver_of_a_job_stays_on_the_worker(spec: Path, submit: Submit, master: str) -> None:
    """Its script and its checkpoint folder are there."""
    spec.write_text(JOB)
    with pytest.raises(ConfigurationError, match="has deploy mode cluster"):
        submit(master)


def test_kubernetes_needs_its_provider(submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Spark hook's NameError becomes a sentence that names the package."""
    monkeypatch.delattr(spark_submit, "kube_client")
    with pytest.raises(ConfigurationError, match="needs a package that is not here"):
        submit("k8s")


def test_a_worker_without_spark_is_reported(
    submit: Submit, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing spark-submit is a configuration error."""
    monkeypatch.setattr(spark_submission, "_list_program_folders", lambda _: "/nowhere")
    with pytest.raises(ConfigurationError, match="there is no spark-submit"):
        submit("local")


def test_the_task_starts_it_and_goes(
    spec: Path, submit: Submit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A detached process submits: log and exit code are its, and no key is an argument."""
    # Not `spark-submit`, which may lie beside this Python.
    _connect(monkeypatch, "spark", "local[2]", None, {"spark-binary": "spark3-submit"})
    (spec.parent / "spark-submit").rename(spec.parent / "spark3-submit")
    monkeypatch.setenv("PATH", str(spec.parent), prepend=os.pathsep)
    monkeypatch.setenv("CODE", str(FailureClass.TRANSIENT.exit_code))
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))
    access, submission = StoreAccess("s3://lake", KEYS), SubmitSpec(conn_id="cluster")
    launched = launch_driver("p", str(spec), access, "latest", submit=submission)
    process = Path(f"/proc/{launched.leader.pid}")
    # While the kernel loads a program, both files are empty for a moment.
    _wait((process / "environ").read_bytes)
    arguments = (process / "cmdline").read_text()
    assert arguments
    assert "do-not-tell" not in arguments
    environment = (process / "environ").read_text()
    assert "do-not-tell" in environment
    assert "nor-that" not in environment  # Airflow's own secrets stay with Airflow
    _wait(lambda: launched.read_exit_code() is not None)
    said = Path(launched.log).read_text()
    assert launched.read_exit_code() == FailureClass.TRANSIENT.exit_code, said
    assert '{"event": "driver log"}' in said.splitlines()
    assert "do-not-tell" not in said


def _wait(true: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_spec_says_how_a_driver_is_launched(spec: Path) -> None:
    """Stream and recovery alike have its `supervision.submit`."""
    dags = build_dags(spec.parent)
    stream = dags["p.stream"].get_task("stream")
    assert isinstance(stream, StreamOperator)
    assert stream.supervision.submit is not None
    recover = dags["p.recover"].get_task("recover")
    assert isinstance(recover, RecoverOperator)
    assert recover.supervision.submit == stream.supervision.submit


@pytest.mark.spark
@pytest.mark.skipif(shutil.which("java") is None, reason="needs a JVM")
def test_spark_itself_reads_the_lines(submit: Submit) -> None:
    """Spark's launcher parses every line and hands the driver's arguments on.

    An option it does not know it would refuse.
    """
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    home = Path(found.origin).parent
    for name in MASTERS:
        _, line, _ = submit(name)
        parse = [
            "java",
            "-cp",
            f"{home}/jars/*",
            "org.apache.spark.launcher.Main",
            "org.apache.spark.deploy.SparkSubmit",
            *line[1:],
        ]
        done = subprocess.run(
            parse, capture_output=True, text=True, timeout=280, check=False, env=_spark(home)
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("\0")[-5:-1] == line[-4:]
    wrong = subprocess.run(
        [*parse[:5], "--no-such", *line[1:]],
        capture_output=True,
        timeout=280,
        check=False,
        env=_spark(home),
    )
    assert b"--no-such" in wrong.stderr or wrong.returncode != 0


def _spark(home: Path) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("SPARK")}
    return {
        **inherited,
        "SPARK_HOME": str(home),
        "SPARK_SCALA_VERSION": "2.13",
        "PYSPARK_PYTHON": sys.executable,
    }
