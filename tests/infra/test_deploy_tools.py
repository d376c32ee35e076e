"""What the programs that read infra/deploy say of it.

Helm, an API server's validation, docker compose, docker build, promtool.

The tools are on PATH or where `make deploy-check` puts them; without them these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from tests.infra.deploy import DEPLOY

from tidegate.infra.minio_server import locate_cache_folder
from tidegate.jobs.driver.startup import ALIVE_FILE
from tidegate.jobs.spec.loader import parse_spec

ROOT = Path(__file__).parents[2]
CHART = DEPLOY / "helm" / "tidegate"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
SPECS = [ROOT / "dags" / "pipelines" / "flights.yaml", ROOT / "docs" / "examples" / "sensors.yaml"]
EVERYTHING: dict[str, Any] = {
    "imagePullSecrets": [{"name": "registry"}],
    "replicas": 3,
    "store": {"endpoint": "https://minio:9000", "caConfigMap": "ca"},
    "environment": {
        "PATIENCE": 10_000_000,
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://otel:4318",
        "DEBUG": True,
    },
    "environmentSecrets": ["kafka-login"],
    "serviceAccount": {"annotations": {"example.org/role": "arn:aws:iam::1:role/x"}},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "streams", "operator": "Exists"}],
}


def tool(name: str) -> str:
    """Where a tool is; skips the test when it is nowhere."""
    built = locate_cache_folder() / "bin" / name
    found = str(built) if built.exists() else shutil.which(name)
    return found or pytest.skip(f"no {name}: make deploy-check builds it")


def said(*command: str, given: str = "", **environment: str) -> tuple[int, str]:
    """Exit code and everything that a command printed."""
    own = {**os.environ, **environment}
    done = subprocess.run(
        command, input=given, env=own, capture_output=True, text=True, timeout=240, check=False
    )
    return done.returncode, done.stdout + done.stderr


def rendered(tmp_path: Path, values: Mapping[str, Any], *options: str) -> str:
    """What helm makes of the chart."""
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    code, text = said(
        tool("helm"), "template", "r", str(CHART), "-f", str(tmp_path / "values.yaml"), *options
    )
    assert code == 0, text
    return text


def made(text: str, kind: str) -> list[dict[str, Any]]:
    """The rendered objects of a kind."""
    return [found for found in YAML(typ="safe").load_all(text) if found and found["kind"] == kind]


def as_given(*paths: Path) -> dict[str, Any]:
    """Specs as a values file has them."""
    return {path.stem: YAML(typ="safe").load(path) for path in paths}


def test_helm_lints_the_chart(tmp_path: Path) -> None:
    """Strictly, with nothing and with every value set."""
    (tmp_path / "values.yaml").write_text(json.dumps({**EVERYTHING, "pipelines": as_given(*SPECS)}))
    for options in ([], ["-f", str(tmp_path / "values.yaml")]):
        code, text = said(tool("helm"), "lint", "--strict", str(CHART), *options)
        assert code == 0, text


@pytest.mark.parametrize(
    "values", [{}, {**EVERYTHING, "pipelines": as_given(*SPECS)}], ids=["nothing", "everything"]
)
def test_an_api_server_takes_the_manifests(values: dict[str, Any], tmp_path: Path) -> None:
    """Types, names, references and defaults are right, and the pods are of the standard
    `restricted`.
    """
    assert said(tool("deploycheck"), "manifests", given=rendered(tmp_path, values)) == (0, "")


def test_an_api_server_takes_what_executors_need(tmp_path: Path) -> None:
    """The rights of a driver that makes pods, its token, and the template of those pods, which its
    settings name.
    """
    values = {
        "executors": {"enabled": True, "conf": {"spark.executor.instances": 4}},
        "pipelines": as_given(*SPECS),
    }
    text = rendered(tmp_path, values)
    assert said(tool("deploycheck"), "manifests", given=text) == (0, "")
    (config,) = (found for found in made(text, "ConfigMap") if "pod.yaml" in found["data"])
    assert said(tool("deploycheck"), "manifests", given=config["data"]["pod.yaml"]) == (0, "")
    settings = dict(
        line.split(" ", 1) for line in config["data"]["spark-defaults.conf"].splitlines()
    )
    assert settings["spark.executor.instances"] == "4"
    pod = made(text, "Deployment")[0]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"]
    (mount,) = (
        found for found in pod["containers"][0]["volumeMounts"] if found["name"] == "executors"
    )
    assert settings["spark.kubernetes.executor.podTemplateFile"] == f"{mount['mountPath']}/pod.yaml"
    (role,) = made(text, "Role")
    assert "create" in role["rules"][0]["verbs"]


def test_chart_makes_what_a_pipeline_needs(tmp_path: Path) -> None:
    """A Deployment, a ConfigMap and a budget per pipeline.

    Numbers among the variables are whole; the CA is mounted.
    """
    text = rendered(tmp_path, {**EVERYTHING, "pipelines": as_given(*SPECS)})
    kinds = [found["kind"] for found in YAML(typ="safe").load_all(text) if found]
    one = ["ConfigMap", "Deployment", "PodDisruptionBudget"]
    assert sorted(kinds) == sorted([*one, *one, "ServiceAccount"])
    container = made(text, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][-3:] == ["--work", "/work", "--standby"]
    assert f"/work/{ALIVE_FILE} " in container["livenessProbe"]["exec"]["command"][-1]
    for name, value in (
        ("AWS_CA_BUNDLE", "/etc/tidegate-ca/ca.pem"),
        ("PATIENCE", "10000000"),
        ("DEBUG", "true"),
    ):
        assert {"name": name, "value": value} in container["env"]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: str(path.stem))
def test_the_driver_reads_the_spec_that_was_given(path: Path, tmp_path: Path) -> None:
    """Written into a values file or named by --set-file: in the pod it is the same pipeline."""
    for text in (
        rendered(tmp_path, {"pipelines": as_given(path)}),
        rendered(tmp_path, {}, "--set-file", f"pipelines.{path.stem}={path}"),
    ):
        (config,) = made(text, "ConfigMap")
        assert parse_spec(config["data"][path.name]) == parse_spec(path.read_text())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("pipelines.left.name=right", 'pipelines.left is the spec of "right"'),
        ("pipelines.left=text", "pipelines.left is the spec of"),
        ("pipelines.left_.name=left_", "Kubernetes takes no name that ends in '_'"),
    ],
)
def test_chart_refuses_what_would_not_run(value: str, words: str) -> None:
    """With a sentence that names the pipeline."""
    code, text = said(tool("helm"), "template", "r", str(CHART), "--set", value)
    assert code != 0
    assert words in text


def test_the_lines_of_the_page_work() -> None:
    """docs/deployment.md installs a release with a secret.

    Helm renders it so, and kubectl makes the secret that it asks for.
    """
    page = (ROOT / "docs" / "deployment.md").read_text().replace("\\\n", " ")
    (install,) = (line for line in page.splitlines() if line.startswith("helm install"))
    words = [tool("helm"), "template", *shlex.split(install)[2:]]
    words = [word.replace("infra/deploy/helm/tidegate", str(CHART)) for word in words]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert said(tool("deploycheck"), "manifests", given=done.stdout) == (0, "")
    (deployment,) = made(done.stdout, "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "registry.example.org/tidegate:0.1.0"
    assert {"name": "TIDEGATE_S3_ENDPOINT", "value": "https://minio.example.org"} in container[
        "env"
    ]
    (create,) = (line for line in page.splitlines() if line.startswith("kubectl create"))
    code, text = said(tool("kubectl"), *shlex.split(create)[1:], "--dry-run=client", "-o", "json")
    assert code == 0, text
    secret = json.loads(text)
    assert container["envFrom"] == [{"secretRef": {"name": secret["metadata"]["name"]}}]
    assert set(secret["data"]) == {"TIDEGATE_S3_ACCESS_KEY", "TIDEGATE_S3_SECRET_KEY"}


def variables() -> dict[str, str]:
    """A value for each variable that the compose file asks for."""
    text = COMPOSE.read_text()
    return {
        part.partition(":?")[0]: "x" for part in text.split("${") if ":?" in part.partition("}")[0]
    }


def test_compose_loads_the_file() -> None:
    """Variables, anchors, mounts and dependencies of every profile are right.

    Without the variables each is asked for.
    """
    known = {
        **variables(),
        "TIDEGATE_DAGS": str(ROOT / "dags"),
    }  # by default where a checkout has them
    assert said(tool("deploycheck"), "compose", str(COMPOSE), **known) == (0, "")
    code, text = said(
        tool("deploycheck"), "compose", str(COMPOSE), **dict.fromkeys(variables(), "")
    )
    assert code == 1
    assert all(name in text for name in variables())


@pytest.mark.parametrize("name", ["Dockerfile", "minio.Dockerfile"])
def test_docker_takes_the_build_files(name: str) -> None:
    """The checks of `docker build --check` find nothing."""
    assert said(tool("deploycheck"), "dockerfile", str(COMPOSE.parent / name)) == (0, "")


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """By Prometheus' own code, over the series of alerts_test.yaml, where each alert has to fire
    somewhere.
    """
    rules = Path(shutil.copy(DEPLOY / "alerts.yaml", tmp_path))
    series = Path(shutil.copy(Path(__file__).with_name("alerts_test.yaml"), tmp_path))
    code, text = said(tool("promtool"), "check", "rules", "--lint=all", "--lint-fatal", str(rules))
    assert code == 0, text
    code, text = said(tool("promtool"), "test", "rules", str(series))
    assert code == 0, text
    alerts = {rule["alert"] for rule in YAML(typ="safe").load(rules)["groups"][0]["rules"]}
    assert {alert for alert in alerts if f'alertname="{alert}"' not in series.read_text()} == set()


def test_faults_are_seen(tmp_path: Path) -> None:
    """The checks do judge: a fault planted for each is named."""
    text = rendered(tmp_path, {"pipelines": {"left": {"name": "left"}}})
    planted = [
        ("replicas: 2", "replica: 2", 'unknown field "spec.replica"'),
        ("name: r-left\n", "name: r_left\n", "must consist of lower case"),
        ("runAsNonRoot: true", "runAsNonRoot: false", "restricted pods: runAsNonRoot != true"),
        ("mountPath: /work}", "mountPath: /tmp}", "must be unique"),
        (
            'tidegate/pipeline: "left"}\n  template',
            'tidegate/pipeline: "right"}\n  template',
            "selector",
        ),
    ]
    for right, wrong, words in planted:
        assert right in text
        code, problems = said(tool("deploycheck"), "manifests", given=text.replace(right, wrong))
        assert code == 1
        assert words in problems
    (tmp_path / "Dockerfile").write_text("FROM debian\nWORKDIR here\n")
    assert (
        "WorkdirRelativePath"
        in said(tool("deploycheck"), "dockerfile", str(tmp_path / "Dockerfile"))[1]
    )
    (tmp_path / "compose.yaml").write_text("services: {a: {image: x, depends_on: [b]}}\n")
    assert (
        "undefined service"
        in said(tool("deploycheck"), "compose", str(tmp_path / "compose.yaml"))[1]
    )
