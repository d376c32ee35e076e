"""What compose.yaml says, run by the real programs.

Its Airflow on PostgreSQL, its Spark cluster, its Kafka broker.

No engine is needed for it: settings and commands are taken out of the file, and addresses and
folders replaced by ones of here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from cryptography.fernet import Fernet
from ruamel.yaml import YAML

from tests.infra.deploy import DEPLOY
from tests.servers.kafka import KafkaServer
from tests.servers.postgres import PostgresServer, running
from tidegate.infra.local_processes import choose_free_port

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = YAML(typ="safe").load(DEPLOY / "compose" / "compose.yaml")

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]


def settings(service: str, known: Mapping[str, str]) -> dict[str, str]:
    """A service's environment with its variables filled in.

    By what is known, by their default, else by a word.
    """

    def value(match: re.Match[str]) -> str:
        default = match[2][2:] if (match[2] or "").startswith(":-") else "word"
        return known.get(match[1], default)

    given = COMPOSE["services"][service]["environment"].items()
    return {name: re.sub(r"\$\{(\w+)(:[-?][^}]*)?\}", value, str(text)) for name, text in given}


@contextmanager
def started(
    command: list[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process, ended with the context."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=dict(environment), cwd=log.parent, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=120)


def until_it_says(log: Path, words: str, process: subprocess.Popen[bytes]) -> None:
    """Look into a log until the words are there."""
    deadline = time.monotonic() + 300
    while words not in log.read_text(errors="replace"):
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


@pytest.fixture
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with running(tmp_path_factory.mktemp) as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("create role airflow login")
            connection.execute("create database airflow owner airflow")
        yield server


def airflow(environment: Mapping[str, str], folder: Path, *command: str) -> None:
    """One command of Airflow's, to its end."""
    whole = [sys.executable, "-m", "airflow", *command]
    done = subprocess.run(
        whole,
        env=dict(environment),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


ASK = """
import asyncio
from airflow.utils.session import create_session_async
from sqlalchemy import text

async def ask():
    async with create_session_async() as session:
        print((await session.execute(text("select dag_id from dag"))).scalars().all())

asyncio.run(ask())
"""


def test_airflow_on_postgresql(postgres: PostgresServer, tmp_path: Path) -> None:
    """The settings of the compose file migrate a database, fill it with the DAGs, serve it, and
    reach it asynchronously.
    """
    asked = settings(
        "airflow-api",
        {"POSTGRES_PASSWORD": "word", "AIRFLOW_FERNET_KEY": Fernet.generate_key().decode()},
    )
    port = choose_free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if "AIRFLOW" not in name},
        **{
            name: text.replace("@postgres/", f"@127.0.0.1:{postgres.port}/")
            for name, text in asked.items()
        },
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "TIDEGATE_PIPELINES": str(ROOT / "dags" / "pipelines"),
        "TIDEGATE_HOME": str(tmp_path),
        "TIDEGATE_STORE": str(tmp_path / "store"),
    }
    airflow(environment, tmp_path, *COMPOSE["services"]["migrate"]["command"][1:])
    airflow(environment, tmp_path, "dags", "reserialize")
    async_answer = subprocess.run(
        [sys.executable, "-c", ASK],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "'flights.stream'" in async_answer.stdout, async_answer.stderr[-3000:]
    command = [
        sys.executable,
        "-m",
        *COMPOSE["services"]["airflow-api"]["command"],
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    log = tmp_path / "api-server.log"
    with started(command, log, environment) as server:
        until_it_says(log, "Application startup complete", server)
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/api/v2/monitor/health", timeout=60
        ) as answer:
            assert json.load(answer)["metadatabase"]["status"] == "healthy"


# In CI, `test_no_shared_disk.py` has a cluster of the same programs. The stranger is refused after a minute.
@pytest.mark.long
def test_a_spark_cluster(tmp_path: Path) -> None:
    """The commands of master and worker start a cluster that computes for who has its secret."""
    port = choose_free_port()

    def write_defaults(folder: str, secret: str) -> str:
        """Spark's own defaults, as docs/deployment.md writes them."""
        (tmp_path / folder).mkdir()
        lines = (
            "spark.authenticate true",
            f"spark.authenticate.secret {secret}",
            "spark.network.crypto.enabled true",
        )
        (tmp_path / folder / "spark-defaults.conf").write_text("\n".join(lines))
        return str(tmp_path / folder)

    local = {
        **os.environ,
        **settings("spark-worker", {}),
        "SPARK_CONF_DIR": write_defaults("known", "told"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    commands = {
        name: [
            part.replace("spark-master:7077", f"127.0.0.1:{port}").replace(
                "spark-master", "127.0.0.1"
            )
            for part in COMPOSE["services"][name]["command"]
        ]
        for name in ("spark-master", "spark-worker")
    }
    logs = {name: tmp_path / f"{name}.log" for name in commands}
    master = [*commands["spark-master"], "--port", str(port), "--webui-port", "0"]
    worker = [
        part.replace("/tmp/spark", str(tmp_path / "work")) for part in commands["spark-worker"]
    ]
    with started(master, logs["spark-master"], local) as process:
        until_it_says(logs["spark-master"], "I have been elected leader", process)
        with started([*worker, "--webui-port", "0"], logs["spark-worker"], local) as process:
            until_it_says(logs["spark-worker"], "Successfully registered with master", process)
            assert "with 2 cores, 2.0 GiB RAM" in logs["spark-worker"].read_text()
            submit = ["spark-submit", "--master", f"spark://127.0.0.1:{port}"]
            submit += ["--conf", "spark.executor.memory=512m"]
            job = tmp_path / "job.py"
            job.write_text(
                "from pyspark.sql import SparkSession\n"
                "print('sum', SparkSession.builder.getOrCreate().range(10).groupBy().sum()"
                ".first()[0])\n"
            )
            stranger = {**local, "SPARK_CONF_DIR": write_defaults("unknown", "guessed")}
            known, unknown = (
                subprocess.run(
                    [*submit, str(job)],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=600,
                    check=False,
                )
                for environment in (local, stranger)
            )
            assert "sum 45" in known.stdout, known.stderr[-3000:]
            assert unknown.returncode != 0
            assert "sum 45" not in unknown.stdout


class AsComposed(KafkaServer):
    """A broker with the settings of the compose file, as its image writes them down.

    Listeners and folder are ours.
    """

    def _settings(self) -> str:
        ours = dict(line.split("=", 1) for line in super()._settings().splitlines())
        named = COMPOSE["services"]["kafka"]["environment"].items()
        composed = {
            name.removeprefix("KAFKA_").lower().replace("_", "."): str(value)
            for name, value in named
        }
        kept = {
            "listeners",
            "advertised.listeners",
            "controller.quorum.voters",
            "log.dirs",
            "listener.security.protocol.map",
        }
        lines = (
            composed
            | {name: ours[name] for name in kept}
            | {"inter.broker.listener.name": "PLAINTEXT"}
        )
        return "".join(f"{name}={value}\n" for name, value in lines.items())


@pytest.mark.kafka
def test_kafka_keeps_its_data_and_has_transactions(
    jars: tuple[list[Path], list[Path]], tmp_path: Path
) -> None:
    """Its messages are in the volume, and one broker is enough for `delivery: exactly_once`."""
    kafka = COMPOSE["services"]["kafka"]
    (mounted,) = (volume.split(":")[1] for volume in kafka["volumes"])
    assert kafka["environment"]["KAFKA_LOG_DIRS"] == mounted
    broker = AsComposed(jars[0], tmp_path / "broker")
    broker.start()
    try:
        producer = Producer({"bootstrap.servers": broker.servers, "transactional.id": "t"})
        producer.init_transactions(120)
        producer.begin_transaction()
        producer.produce("out", b"1")
        producer.commit_transaction(120)
    finally:
        broker.stop()
