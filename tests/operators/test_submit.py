"""The lines by which drivers are submitted.

Built by the Spark provider's hook, read by Spark's own parser, without a cluster.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from airflow.providers.apache.spark.hooks import spark_submit

from tidegate.errors import ConfigurationError
from tidegate.operators.driver_launch import LocalLauncher, SubmitLauncher, make_launcher
from tidegate.operators.factory import build_dags
from tidegate.operators.recover_and_pin import RecoverOperator
from tidegate.operators.store_access import StoreAccess
from tidegate.operators.stream_operator import StreamOperator

SPEC = """\
apiVersion: tidegate/v1
name: p
sources:
  one: {path: inbox/one, schema: {at: timestamp}, event_time: at, lag: 1m}
spark: {driver_memory: 1g, conf: {spark.sql.shuffle.partitions: "8"}}
sinks:
  out: {kind: kafka, servers: "b:9092", topic: out, options: {sasl.jaas.config: "env:KAFKA_JAAS"}}
supervision: {submit: {conn_id: cluster, py_files: [/opt/tidegate.whl], conf: {spark.executor.memory: 2g}}}
"""
JAAS = 'PlainLoginModule required password="a\\b";'
ACCESS = StoreAccess(
    "s3://lake", {"TIDEGATE_S3_SECRET_KEY": "do-not-tell", "TIDEGATE_S3_ACCESS_KEY": "who"}
)
MASTERS = {
    "standalone": ("spark", "spark://10.0.0.1", 7077, {}),
    "yarn-client": ("spark", "yarn", None, {"deploy-mode": "client", "queue": "streams"}),
    "yarn-cluster": ("spark", "yarn", None, {"deploy-mode": "cluster", "queue": "streams"}),
    "k8s": (
        "spark",
        "k8s://https://10.0.0.2",
        6443,
        {"deploy-mode": "cluster", "namespace": "streams"},
    ),
}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """The pipeline's file."""
    file = tmp_path / "p.yaml"
    file.write_text(SPEC)
    return file


def _connect(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # The Kubernetes provider is not installed here; building the line asks nothing of it.
    monkeypatch.setattr(spark_submit, "kube_client", object(), raising=False)
    kind, host, port, extra = MASTERS[name]
    found = {"conn_type": kind, "host": host, "port": port, "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(found))


def _line(spec: Path) -> list[str]:
    conf = {
        "spark.executor.memory": "2g",
        "spark.kubernetes.file.upload.path": "s3a://lake/submitted",
    }
    launcher = SubmitLauncher("cluster", ["/opt/tidegate.whl"], conf)
    stem = spec.parent / uuid.uuid4().hex
    inherited = {
        "KAFKA_JAAS": JAAS,
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://o",
        "AWS_CA_BUNDLE": "/ca",
        "HOME": "/home/airflow",
    }
    environment = {**ACCESS.environment, "TIDEGATE_STORE": ACCESS.url, **inherited}
    return launcher.build_command(str(spec), ACCESS, "latest", stem, environment)


def _after(line: list[str], option: str) -> list[str]:
    return [value for name, value in pairwise(line) if name == option]


@pytest.mark.parametrize("name", MASTERS)
def test_no_key_is_an_argument(spec: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Master, memory, settings and packages stand in the line, the store's keys never do."""
    _connect(monkeypatch, name)
    line = _line(spec)
    host = MASTERS[name][1]
    assert _after(line, "--master")[0].startswith(host)
    assert _after(line, "--py-files") == ["/opt/tidegate.whl"]
    assert {"spark.sql.shuffle.partitions=8", "spark.executor.memory=2g"} <= set(
        _after(line, "--conf")
    )
    assert line[-4:] == ["--store", "s3://lake", "--recover-to", "latest"]
    assert "do-not-tell" not in " ".join(line)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("yarn-cluster", "spark.yarn.appMasterEnv"), ("k8s", "spark.kubernetes.driverEnv")],
)
def test_a_driver_elsewhere_gets_its_keys_privately(
    spec: Path, monkeypatch: pytest.MonkeyPatch, name: str, prefix: str
) -> None:
    """In a properties file that only its owner reads; the spec travels along."""
    _connect(monkeypatch, name)
    line = _line(spec)
    (file,) = _after(line, "--properties-file")
    found = dict(line.split(" ", 1) for line in Path(file).read_text().splitlines())
    assert found[f"{prefix}.TIDEGATE_S3_SECRET_KEY"] == "do-not-tell"
    assert found[f"{prefix}.KAFKA_JAAS"] == JAAS.replace("\\", "\\\\")
    assert {f"{prefix}.{name}" for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "AWS_CA_BUNDLE")} < set(
        found
    )
    assert f"{prefix}.HOME" not in found
    assert "--load-spark-defaults" in line
    assert Path(file).stat().st_mode & 0o777 == 0o600
    assert _after(line, "--files") == [str(spec)]
    assert line[-5] == "p.yaml"


def test_a_standalone_master_takes_no_python_driver(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before Spark would say it, with what to change."""
    monkeypatch.setenv(
        "AIRFLOW_CONN_CLUSTER",
        json.dumps(
            {
                "conn_type": "spark",
                "host": "spark://h",
                "port": 7077,
                "extra": {"deploy-mode": "cluster"},
            }
        ),
    )
    with pytest.raises(ConfigurationError, match="takes no Python driver"):
        _line(spec)


def test_kubernetes_fetches_the_program_from_somewhere(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before a driver's pod would fail for it."""
    _connect(monkeypatch, "k8s")
    with pytest.raises(ConfigurationError, match=r"spark\.kubernetes\.file\.upload\.path"):
        SubmitLauncher("cluster").build_command(
            str(spec), ACCESS, "latest", spec.parent / "x", ACCESS.environment
        )


def test_kubernetes_needs_its_provider(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Spark hook's NameError becomes a sentence that names the package."""
    _connect(monkeypatch, "k8s")
    monkeypatch.delattr(spark_submit, "kube_client")
    with pytest.raises(ConfigurationError, match="needs a package that is not here"):
        _line(spec)


def test_the_spec_chooses_the_launcher(spec: Path) -> None:
    """With `supervision.submit` by spark-submit, else a process on the worker's host.

    Stream and recovery alike.
    """
    dags = build_dags(spec.parent)
    stream = dags["p.stream"].get_task("stream")
    assert isinstance(stream, StreamOperator)
    assert isinstance(make_launcher(stream.submit), SubmitLauncher)
    assert isinstance(make_launcher(None), LocalLauncher)
    recover = dags["p.recover"].get_task("recover")
    assert isinstance(recover, RecoverOperator)
    assert recover.submit == stream.submit


@pytest.mark.spark
@pytest.mark.skipif(shutil.which("java") is None, reason="needs a JVM")
def test_spark_itself_reads_the_lines(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's launcher parses every line and hands the driver's arguments on.

    An option it does not know it would refuse.
    """
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    home = Path(found.origin).parent
    for name in MASTERS:
        _connect(monkeypatch, name)
        line = _line(spec)
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
