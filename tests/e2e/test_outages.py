"""The world goes away and comes back.

MinIO, the names it is asked for, the disk, and the driver's own time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.drivers import Piped, Steady, wait_for
from tests.e2e.feed import SOURCES, SPEC, write_feed
from tests.servers.minio import RealMinio, running
from tidegate.checkpoints.driver_reports import read_status
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store, StoreUnavailableError
from tidegate.checkpoints.store_probe import probe_store
from tidegate.errors import TidegateError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

BUCKET = "outages"


@pytest.fixture(scope="module")
def minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealMinio]:
    """A MinIO that may be killed."""
    with running(tmp_path_factory.mktemp("own-minio"), BUCKET) as found:
        yield found


@pytest.fixture
def named(minio: RealMinio, monkeypatch: pytest.MonkeyPatch) -> RealMinio:
    """That MinIO, named by the environment."""
    for key, value in minio.environment().items():
        monkeypatch.setenv(key, value)
    return minio


def in_bucket(folder: Path, name: str, objects: int) -> Steady:
    """The steady pipeline with its feed in the bucket."""
    steady = Steady(folder, objects, f"s3://{BUCKET}/{name}")
    store = steady.store()
    for path in sorted((steady.inbox / "inbox").rglob("*")):
        if path.is_file():
            store.put(str(path.relative_to(steady.inbox)), path.read_bytes())
    return steady


def slot(store: Store) -> int:
    """The newest sealed slot; 0 while no one answers."""
    try:
        return SlotLog(store, "steady").head().slot
    except TidegateError:
        return 0


def waits(store: Store) -> dict[str, Any] | None:
    """The error that the driver's status names while it waits."""
    status = read_status(store, "steady")
    return status.body["error"] if status and status.body["state"] == "waiting" else None


def told(
    store: Store, driver: subprocess.Popen[bytes], *, over: Callable[[], bool] = lambda: False
) -> dict[str, Any] | None:
    """The error of the first look at which the driver's status says that it waits.

    None if that was over before a look.
    """
    found: list[dict[str, Any]] = []

    def look() -> bool:
        error = waits(store)
        found.extend([error] if error else [])
        return bool(found) or over()

    wait_for(look, driver)
    return found[0] if found else None


@contextmanager
def ending(*drivers: subprocess.Popen[bytes]) -> Iterator[None]:
    """No driver outlives its test."""
    try:
        yield
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()


@pytest.mark.slow
def test_minio_down_at_start_and_killed_in_the_middle(named: RealMinio, tmp_path: Path) -> None:
    """The driver waits audibly, says in words what is wrong, goes on by itself, and the tables are
    exact.
    """
    steady, server = in_bucket(tmp_path, "down", 24), named.server
    server.kill()
    driver = steady.start()
    with ending(driver):
        wait_for(lambda: steady.said("store_away"), driver)
        assert named.server.endpoint in steady.said("store_away")[0]["error"]
        server.start()
        store = steady.store()
        wait_for(lambda: slot(store) >= 2, driver)
        server.kill()
        wait_for(lambda: steady.said("transient"), driver)
        server.start()
        before = slot(store)
        error = (
            told(store, driver, over=lambda: slot(store) > before) or steady.said("transient")[0]
        )
        words = error.get("message") or error["error"]
        assert "could not be reached" in words or "no answer to the write" in words
        assert driver.wait(timeout=900) == 0, steady.log_text()
    assert "Traceback" not in steady.log_text()
    assert steady.exact().problems == []
    status = read_status(store, "steady")
    assert status is not None
    assert (status.body["state"], status.body["error"]) == ("finished", None)


def test_wrong_names_end_with_advice(named: RealMinio, tmp_path: Path) -> None:
    """A bucket that is not there and keys that are not right.

    Exit code 2, what to check, no traceback.
    """
    wrong_key = {"TIDEGATE_S3_SECRET_KEY": "not-the-secret"}
    root = {
        "TIDEGATE_S3_ACCESS_KEY": named.server.root.access_key,
        "TIDEGATE_S3_SECRET_KEY": named.server.root.secret_key,
    }
    cases = {
        "bucket": (
            Piped(tmp_path / "bucket", SPEC, "s3://no-such-bucket/x"),
            root,
            "bucket no-such-bucket does not exist",
        ),
        "keys": (Piped(tmp_path / "keys", SPEC, f"s3://{BUCKET}/x"), wrong_key, "refuses: "),
    }
    drivers = {
        name: pipeline.start(environment=keys) for name, (pipeline, keys, _) in cases.items()
    }
    with ending(*drivers.values()):
        for name, (pipeline, _, words) in cases.items():
            assert drivers[name].wait(timeout=900) == 2, pipeline.log_text()
            (last,) = pipeline.said("ended")
            assert words in last["message"]
            assert named.server.endpoint in last["message"]
            assert "TIDEGATE_S3_SECRET_KEY" in last["advice"]
            assert "Traceback" not in pipeline.log_text()
            assert "not-the-secret" not in pipeline.log_text()


@pytest.mark.slow
def test_a_driver_that_slept_through_its_lease(named: RealMinio, tmp_path: Path) -> None:
    """SIGSTOP for longer than the TTL.

    Another driver takes over; the sleeper wakes, finds out and ends as fenced.
    """
    steady = in_bucket(tmp_path, "sleep", 24)
    store = steady.store()
    sleeper = steady.start()
    with ending(sleeper):
        wait_for(lambda: slot(store) >= 2, sleeper)
        sleeper.send_signal(signal.SIGSTOP)
        slept_at = slot(store)
        other = steady.start()
        with ending(other):
            wait_for(lambda: slot(store) > slept_at + 1, other)
            lease = read_lease(store, "steady")
            assert lease is not None
            assert (lease.token, lease.holder and lease.holder.pid) == (2, other.pid)
            sleeper.send_signal(signal.SIGCONT)
            assert sleeper.wait(timeout=900) == 4, steady.log_text(1)
            assert other.wait(timeout=900) == 0, steady.log_text(2)
    (last,) = steady.said("ended", 1)
    assert (last["class"], last["code"]) == ("fenced", "lease.lost")
    assert "Traceback" not in steady.log_text(1) + steady.log_text(2)
    assert steady.exact().problems == []


class LookedInto(LocalStore):
    """A store in another mount namespace.

    Its path must not be resolved: that would lead out of there again.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, f"file://{root}"
        self._temporary = root / ".tidegate-store"
        self._temporary.mkdir(exist_ok=True)
        self._lock_file = self._temporary / "lock"
        self._lock_file.touch()


class SmallDisks:
    """Two file systems of a few MB in a mount namespace of their own.

    One for the store, one for scratch files.
    """

    def __init__(self, store: Path, scratch: Path) -> None:
        script = (
            'for d in "$0" "$1"; do mount -t tmpfs -o size=4m tidegate "$d" || exit 1; done; echo'
            " up; exec sleep 3600"
        )
        scratch.mkdir()
        self._holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", script, str(store), str(scratch)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._holder.stdout is not None
        with self._holder.stdout as said:
            self.up = said.readline() == b"up\n"
        self.enter = ("nsenter", "-t", str(self._holder.pid), "-m")

    def inside(self, path: Path) -> Path:
        """The same path as the driver sees it."""
        return Path(f"/proc/{self._holder.pid}/root{path}")

    @contextmanager
    def full(self, path: Path) -> Iterator[None]:
        """Not a byte of room in there."""
        ballast = self.inside(path) / ".ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            for size in (1 << 20, 4096, 1):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))
        try:
            yield
        finally:
            ballast.unlink()

    def close(self) -> None:
        """The last process in the namespace takes it along."""
        self._holder.kill()
        self._holder.wait()


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("nsenter") is None, reason="mounting a small disk needs root"
)
@pytest.mark.slow
def test_full_disks_are_waited_out(tmp_path: Path) -> None:
    """No room for scratch files, then none in the store.

    Said in words, nothing lost, and on by itself once there is room.
    """
    steady, scratch, feed = Piped(tmp_path, SPEC), tmp_path / "scratch", tmp_path / "feed"
    write_feed(feed, 12)
    disks = SmallDisks(steady.inbox, scratch)
    if not disks.up:
        disks.close()
        pytest.skip("this container may not mount")
    try:
        bucket = disks.inside(steady.inbox)
        deliver(feed, bucket, 0, 2)
        # Where the driver and its tasks write a file before it goes to the store.
        environment = {"TMPDIR": str(scratch)}
        driver = steady.start("", environment=environment, prefix=disks.enter)
        with ending(driver):
            store = LookedInto(bucket)
            wait_for(lambda: slot(store) >= 2, driver)
            with disks.full(scratch):
                deliver(feed, bucket, 2, 4)
                error = told(store, driver)
            assert error is not None
            assert (error["code"], error["class"]) == ("driver.disk_full", "transient")
            assert "no space left" in error["message"]
            before = slot(store)
            wait_for(lambda: slot(store) > before, driver)
            deliver(feed, bucket, 4, 12)
            with disks.full(steady.inbox):
                wait_for(
                    lambda: any(said["code"] == "store.full" for said in steady.said("transient")),
                    driver,
                )
                with pytest.raises(StoreUnavailableError, match="disk is full"):
                    probe_store(
                        store
                    )  # what `tidegate status` shows beside a status that cannot be written
            for source in SOURCES:
                (bucket / "inbox" / source / "_DONE").touch()
            assert driver.wait(timeout=900) == 0, steady.log_text()
        shutil.copytree(
            bucket, steady.inbox, dirs_exist_ok=True
        )  # tables name their files by absolute paths
    finally:
        disks.close()
    assert "Traceback" not in steady.log_text()
    found = steady.exact()
    assert found.problems == []
    assert sum(source["read"] for source in found.rows.values()) > 12 * 3 * 39


def deliver(feed: Path, bucket: Path, first: int, last: int) -> None:
    """Objects `first` to `last` (exclusive) of every source arrive, each whole."""
    for source in SOURCES:
        folder = bucket / "inbox" / source
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(first, last):
            hidden = folder / f".{number}"
            shutil.copyfile(feed / "inbox" / source / f"{number:05d}.parquet", hidden)
            hidden.replace(folder / f"{number:05d}.parquet")
