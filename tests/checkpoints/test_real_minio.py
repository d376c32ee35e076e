"""The bucket side against a MinIO that is killed under it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import run
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.s3_store import S3Settings, S3Store
from tidegate.checkpoints.slot_log import LogHead, Sealed, SlotLog, SlotTaken
from tidegate.infra.local_processes import is_port_free
from tidegate.infra.minio_server import MinioServer, ensure_minio, provision_bucket
from tidegate.infra.provision import Credentials

if TYPE_CHECKING:
    from tests.checkpoints.conftest import Author


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MinioServer]:
    """A MinIO of its own, to be killed."""
    server = MinioServer(ensure_minio(lambda line: None), tmp_path / "data", tmp_path / "minio.log")
    server.start()
    yield server
    server.kill()


def open_log(server: MinioServer, app: Credentials) -> SlotLog:
    """A log with little patience for single requests."""
    settings = S3Settings(
        bucket="bucket",
        endpoint=server.endpoint,
        access_key=app.access_key,
        secret_key=SecretStr(app.secret_key),
        read_timeout=15.0,
        budget=1.0,
    )
    return SlotLog(S3Store(settings), "p", seal_budget=200.0)


def crash(server: MinioServer) -> None:
    """kill -9, and wait until the kernel has given its port back.

    Threads of a killed process may end after its leader.
    """
    server.kill()
    while not is_port_free(server.port):
        threading.Event().wait(0.01)


@pytest.mark.minio
def test_a_seal_outlasts_a_killed_server(server: MinioServer, author: Author) -> None:
    """A server that is gone when the PUT is sent, and comes back later, ends with the epoch sealed
    once.
    """
    app = Credentials.generate("app")
    provision_bucket(server, "bucket", app)
    log = open_log(server, app)
    first = author.seal(log)
    manifest = author.manifest(log.head())
    crash(server)
    outcome: list[Sealed | SlotTaken] = []
    sealing = threading.Thread(target=lambda: outcome.append(log.seal(manifest)))
    sealing.start()
    server.start()
    sealing.join(240)
    assert isinstance(outcome[0], Sealed)
    assert [f.epoch for f in log.epochs_between(0, 1, 9)] == [first, manifest]


@pytest.mark.minio
def test_many_kills_lose_and_double_nothing(server: MinioServer, author: Author) -> None:
    """While one thread seals epoch after epoch, the server is killed again and again at whatever
    moment; the chain holds.
    """
    app = Credentials.generate("app")
    provision_bucket(server, "bucket", app)
    log = open_log(server, app)
    answers: list[tuple[Manifest, Sealed | SlotTaken]] = []
    ended = threading.Event()

    start = log.head()

    def drive() -> None:
        head = start
        while len(answers) < 200:
            manifest = author.manifest(head)
            outcome = log.seal(manifest)
            answers.append((manifest, outcome))
            head = LogHead(0, manifest.slot, manifest, outcome.sha256, outcome.etag)
        ended.set()

    driving = threading.Thread(target=drive, daemon=True)
    driving.start()
    kills = 0
    while not ended.wait(0.3) and kills < 5:
        crash(server)
        server.start()
        kills += 1
    driving.join(240)
    assert ended.is_set()
    assert kills > 0
    assert all(isinstance(outcome, Sealed) for _, outcome in answers)
    assert [f.epoch for f in log.epochs_between(0, 1, 999)] == [manifest for manifest, _ in answers]


@pytest.mark.minio
def test_a_lease_outlives_a_restart_of_the_server(server: MinioServer) -> None:
    """After the server comes back the holder renews and keeps its token."""
    app = Credentials.generate("app")
    provision_bucket(server, "bucket", app)
    store = open_log(server, app).store
    lease = Lease.acquire(store, "p", ProcessIdentity.this_process())
    crash(server)
    server.start()
    lease.renew()
    lease.ensure_held()
    assert lease.token == 1


def test_light_parts_stay_light() -> None:
    """What Airflow imports while parsing DAGs brings in neither boto3 nor Spark nor Great
    Expectations.
    """
    modules = (
        "bucket_layout checkpoint_catalog driver_reports driver_requests epoch_notes"
        " host_clock lease manifest open_store pins pipeline_identity restore"
        " shared_documents slot_log store"
    )
    code = ";".join(f"import tidegate.checkpoints.{name}" for name in modules.split())
    heavy = (
        "{'boto3', 'botocore', 'pyspark', 'great_expectations', 'pyiceberg', 'minio', 'airflow',"
        " 'pyarrow', 'pandas'}"
    )
    done = run(
        [sys.executable, "-c", f"{code}; import sys; print({heavy} & set(sys.modules))"],
        capture_output=True,
        check=True,
    )
    assert done.stdout.strip() == b"set()"
