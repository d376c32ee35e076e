"""The store on a second S3 server (versitygw on a plain folder).

The promises are S3's, not MinIO's.
"""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from tidegate.checkpoints.lease import Lease, LeaseLostError
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.s3_store import S3Settings, S3Store
from tidegate.checkpoints.slot_log import Sealed, SlotLog, SlotTaken
from tidegate.checkpoints.store_probe import require_honest_store, run_write_races
from tidegate.infra.local_processes import LOOPBACK, choose_free_port, kill_processes, spawn_process
from tidegate.infra.minio_server import locate_cache_folder

if TYPE_CHECKING:
    from tests.checkpoints.conftest import Author

pytestmark = [pytest.mark.minio, pytest.mark.slow]


def program() -> Path:
    """The server, built by hand beforehand.

    It takes minutes, and the default tier does not need it.
    """
    found = shutil.which("versitygw") or str(locate_cache_folder() / "bin" / "versitygw")
    if not Path(found).exists():
        pytest.skip(
            f"no {found}: GOBIN={Path(found).parent} go install"
            " github.com/versity/versitygw/cmd/versitygw@v1.8.0"
        )
    return Path(found)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Store]:
    folder = tmp_path_factory.mktemp("versitygw")
    (folder / "data" / "bucket").mkdir(parents=True)
    (folder / "sidecar").mkdir()
    port = choose_free_port()
    address = f"{LOOPBACK}:{port}"
    command = [
        str(program()),
        "--port",
        address,
        "posix",
        "--sidecar",
        str(folder / "sidecar"),
        str(folder / "data"),
    ]
    keys = {"ROOT_ACCESS_KEY": "access", "ROOT_SECRET_KEY": "secret-secret"}
    mark = spawn_process(command, log=folder / "log", env=keys)
    try:
        wait_for(port)
        secret = SecretStr(keys["ROOT_SECRET_KEY"])
        yield S3Store(
            S3Settings(
                bucket="bucket",
                endpoint=f"http://{address}",
                access_key="access",
                secret_key=secret,
            )
        )
    finally:
        kill_processes([mark])


def wait_for(port: int) -> None:
    """Wait until someone listens."""
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex((LOOPBACK, port)) == 0:
                return
        threading.Event().wait(0.1)
    raise TimeoutError(port)


def test_the_probe_finds_it_honest(store: S3Store) -> None:
    """Every conditional write the protocol needs is honoured."""
    require_honest_store(store)
    assert run_write_races([store]) == []


def test_the_log_works_on_it(store: S3Store, author: Author) -> None:
    """Epochs, a lost race and a restore."""
    log = SlotLog(store, "p")
    manifests = author.extend(log, 3, with_files=True)
    head = log.head()
    rival = author.manifest(head)
    author.seal(log)
    assert isinstance(log.seal(rival), SlotTaken)
    assert isinstance(
        log.fork(log.head(), manifests[0].id, request_id="r", who="ann", why=""), Sealed
    )
    assert log.head().record == manifests[0]


def test_the_lease_works_on_it(store: S3Store) -> None:
    """Taken, renewed, released, taken over; the old holder finds out."""
    holder = ProcessIdentity.this_process()
    one = Lease.acquire(store, "leased", holder)
    one.renew()
    one.release()
    two = Lease.acquire(store, "leased", holder)
    assert two.token == 2
    with pytest.raises(LeaseLostError):
        one.ensure_held()
