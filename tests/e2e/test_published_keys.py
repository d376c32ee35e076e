"""What Spark publishes during a run has no key of the store and no secret of a broker."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from secrets import token_urlsafe
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit
from urllib.request import urlopen

import psutil
import pytest

from tests.e2e.drivers import Piped, wait_for
from tests.sealed_queries.apps import Clicks
from tests.sealed_queries.jobs_proof import list_checkpoint_jars
from tests.sealed_queries.rig import KilledJob
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import KafkaClient
from tests.servers.minio import RealMinio, running
from tests.servers.processes import list_children
from tests.servers.spark import standalone
from tidegate.infra.local_processes import choose_free_port
from tidegate.infra.minio_server import provision_bucket
from tidegate.infra.provision import Credentials

# CI has no minute left for it.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

_START = datetime(2026, 3, 1, tzinfo=UTC)
_CANARY = "seen-by-everyone"
_SPEC = """\
apiVersion: tidegate/v1
name: clicks
sources:
  web:
    kind: kafka
    kafka:
      servers: {servers}
      topic: clicks
      options:
        security.protocol: SASL_PLAINTEXT
        sasl.mechanism: PLAIN
        sasl.jaas.config: env:BROKER_LOGIN
        client.id: env:BROKER_CLIENT
    schema: {{at: timestamp, item: string, amount: long}}
    event_time: at
    lag: 1s
    limits: {{rows: 10}}
coalesce: {{idle_timeout: never}}
release: {{mode: ordered}}
windows:
  per_minute: {{kind: tumbling, size: 1m, keys: [item], aggregates: {{n: count(*)}}, lateness: 2m}}
checkpoint: {{idle_interval: 100ms}}
spark:
  master: {master}
  driver_memory: 512m
  staging: bucket
  conf: {conf}
"""
_RETAINED = (
    "spark.ui.retainedJobs",
    "spark.ui.retainedStages",
    "spark.ui.retainedTasks",
    "spark.sql.ui.retainedExecutions",
)
_REST = (
    "environment",
    "jobs",
    "stages?details=true",
    "allexecutors",
    "storage/rdd",
    "sql?details=true&planDescription=true",
    "streaming/statistics",
)
_LINK = re.compile(r"""(?:href|src)=['"]([^'"#]+)""")
# Links that end things, show the same rows in other orders, or are no pages.
_SKIPPED = re.compile(r"kill|[.]sort=|[.](js|css|png|svg)$")


@dataclass
class Published:
    """What Spark shows of a driver, by surface and by address or file.

    Args:
        folder: gets the event log.
    """

    folder: Path
    found: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._port, self._events = choose_free_port(), self.folder / "events"
        self._events.mkdir()

    def conf(self) -> dict[str, str]:
        """Settings with which Spark publishes all it can, and one value that has to be found."""
        return {
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "true",
            "spark.ui.port": str(self._port),
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": self._events.as_uri(),
            "spark.eventLog.compress": "false",
            "spark.test.canary": _CANARY,
            **dict.fromkeys(_RETAINED, "100"),
        }

    def read_pages(self, sites: Mapping[str, str]) -> None:
        """Read the pages of the running driver and of other sites, and all command lines."""
        root = f"http://127.0.0.1:{self._port}"
        self.found["driver"] = _read_site(f"{root}/")
        self.found["rest"] = _read_rest(f"{root}/api/v1/applications")
        self.found |= {name: _read_site(address) for name, address in sites.items()}
        commands = [" ".join(_read_command(one)) for one in psutil.process_iter()]
        self.found["commands"] = {str(number): line for number, line in enumerate(commands)}

    def read_files(self, logs: Mapping[str, list[Path]]) -> None:
        """Read the event log and other files, after the driver's end."""
        events = [file for file in self._events.rglob("*") if file.is_file()]
        for name, files in {"event log": events, **logs}.items():
            self.found[name] = {str(one): one.read_text(errors="replace") for one in files}

    def find(self, text: str) -> list[tuple[str, str]]:
        """Where a text can be read: surface, and address or file."""
        return [
            (surface, name)
            for surface, pages in self.found.items()
            for name, page in pages.items()
            if text in page
        ]

    def check(self, secrets: Mapping[str, str]) -> None:
        """Require that each surface was read, and shows none of these."""
        shown = {surface for surface, _ in self.find(_CANARY)}
        assert {"driver", "rest", "event log"} <= shown, "not all is read"
        assert len(self.found["driver"]) > 10
        assert "SparkSubmit" in "".join(self.found["commands"].values())
        found = {name: self.find(text) for name, text in secrets.items()}
        assert not any(found.values()), found


@pytest.fixture
def minio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealMinio]:
    """A MinIO, whose keys are in no environment yet."""
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    with running(tmp_path) as found:
        yield found


@pytest.fixture
def broker(
    jars: tuple[list[Path], list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KafkaServer]:
    """A broker that asks for a login, which the environment has, and the messages of a topic."""
    password = token_urlsafe(30)
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    login = f'{module} required username="ann" password="{password}";'
    monkeypatch.setenv("BROKER_LOGIN", login)
    monkeypatch.setenv("BROKER_PASSWORD", password)
    server = KafkaServer(jars[0], tmp_path / "broker", login=("ann", password))
    server.start()
    try:
        client = KafkaClient(jars[0], server.open_servers)
        client.topic("clicks", 1)
        client.allow("ann", "clicks")
        for number in range(40):
            client.send("clicks", 0, _message(number))
        client.flush()
        client.close()
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize("have_own", [False, True], ids=["keys of the driver", "own keys"])
def test_no_secret_of_a_pipeline_is_published(
    minio: RealMinio,
    broker: KafkaServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    have_own: bool,
) -> None:
    """Executors with keys of their own do not get the driver's, neither of the store nor of brokers."""
    narrow, published = Credentials.generate("executor"), Published(tmp_path)
    provision_bucket(minio.server, minio.bucket, narrow)
    drivers = {
        "access key": minio.app.access_key,
        "secret key": minio.app.secret_key,
        "name at brokers": token_urlsafe(30),
    }
    own = {
        "own access key": narrow.access_key,
        "own secret key": narrow.secret_key,
        "own name at brokers": token_urlsafe(30),
    }
    with ExitStack() as stack:
        with monkeypatch.context() as hosts:
            if have_own:
                hosts.setenv("TIDEGATE_EXECUTOR_S3_ACCESS_KEY", narrow.access_key)
                hosts.setenv("TIDEGATE_EXECUTOR_S3_SECRET_KEY", narrow.secret_key)
                hosts.setenv("BROKER_CLIENT", own["own name at brokers"])
            cluster = stack.enter_context(standalone(tmp_path, 1))
        for name, value in minio.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("BROKER_CLIENT", drivers["name at brokers"])
        conf = json.dumps(published.conf())
        spec = _SPEC.format(servers=broker.servers, master=cluster.master, conf=conf)
        pipeline = Piped(tmp_path / "p", spec, f"s3://{minio.bucket}/published")
        driver = pipeline.start()
        stack.callback(driver.wait)
        stack.callback(driver.kill)
        wait_for(lambda: pipeline.log().head().slot >= 2, driver)
        worker = tmp_path / "worker-0.log"
        published.read_pages({"master": _find_page(cluster.log), "worker": _find_page(worker)})
        hosts_know = _read_environments(cluster.workers[0].pid)
        driver.terminate()
        assert driver.wait(timeout=900) == 0, pipeline.log_text()
    assert "python_tasks_unavailable" not in pipeline.log_text()
    logs = {
        "executor": [*tmp_path.glob("worker-0/*/*/std*")],
        "cluster": [cluster.log, worker],
        "log": [pipeline.folder / "driver-1.log"],
    }
    published.read_files(logs)
    assert published.found["executor"]
    assert "CoarseGrainedExecutorBackend" in "".join(published.found["commands"].values())
    published.check({**drivers, **own, "password": os.environ["BROKER_PASSWORD"]})
    # The other side of it: whose keys the hosts have.
    assert all((text in hosts_know) is have_own for text in own.values())
    assert all((text in hosts_know) is not have_own for text in drivers.values())


def test_no_key_of_a_job_is_published(
    minio: RealMinio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An own job hands its keys to S3A, which keeps the checkpoints of its queries in the bucket."""
    for name, value in minio.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TIDEGATE_SPARK_JARS", list_checkpoint_jars())
    published = Published(tmp_path)
    url = f"s3://{minio.bucket}/published"
    conf = published.conf()
    with closing(KilledJob(tmp_path / "job", conf, Clicks, 2, url, location="bucket")) as job:
        job.launch()
        job.wait(lambda: job.holds_lease() and job.is_complete())
        published.read_pages({})
        assert job.stop() == 0, job.read_end_of_log()
    published.read_files({"log": [job.folder / "driver.log"]})
    published.check({"access key": minio.app.access_key, "secret key": minio.app.secret_key})


def _message(number: int) -> str:
    at = (_START + timedelta(seconds=number)).isoformat()
    return json.dumps({"at": at, "item": "ab"[number % 2], "amount": number})


def _find_page(log: Path) -> str:
    """The address of the pages of a master or worker, as its log has it."""
    found = re.search(r"WebUI.*started at (http://\S+)", log.read_text())
    assert found is not None, log.read_text()
    return found[1]


def _read_site(root: str) -> dict[str, str]:
    """All pages that links of a site lead to."""
    found: dict[str, str] = {}
    waiting = [root]
    while waiting:
        address = waiting.pop()
        is_elsewhere = urlsplit(address).netloc != urlsplit(root).netloc
        if address in found or is_elsewhere or _SKIPPED.search(address):
            continue
        found[address] = _get(address)
        links = map(unescape, _LINK.findall(found[address]))
        waiting += [urljoin(address, link.replace(" ", "%20")) for link in links]
        assert len(found) < 2000, "the site has no end"
    return found


def _read_rest(root: str) -> dict[str, str]:
    applications = _get(root)
    (application,) = re.findall(r'"id" : "([^"]+)"', applications)
    addresses = [f"{root}/{application}/{name}" for name in _REST]
    return {root: applications, **{address: _get(address) for address in addresses}}


def _get(address: str) -> str:
    try:
        with urlopen(address, timeout=60) as answer:
            return str(answer.read().decode(errors="replace"))
    except HTTPError as error:  # its text is published as well
        return error.read().decode(errors="replace")


def _read_command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _read_environments(pid: int) -> str:
    """The environments with which a process and those below it were started."""
    found = []
    for process in [psutil.Process(pid), *list_children(pid)]:
        with suppress(psutil.NoSuchProcess):
            found.append(str(process.environ()))
    return "\n".join(found)
