"""An Airflow task launches drivers by the Spark provider's hook, and keeps one alive.

It also keeps a standby beside it, and loses sight of no driver when the triggerer is killed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGKILL
from typing import Any

import psutil
import pytest

from tests.e2e.airflow_kills import PIPELINE, Feed
from tests.e2e.feed import SPEC, write_feed
from tests.servers.airflow import ApiForTests
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import FailureClass
from tidegate.infra.local_stack import Stack, StackSettings
from tidegate.infra.stack_state import StackState

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).resolve().parents[2]
SPEC_OF_THE_FEED = SPEC.replace("limits: {objects: 1}", "limits: {objects: 8}")
OBJECTS = 900  # of each source, one a second: as long as a test may take
STANDBY_KILLS = 1


class Supervised:
    """A stream that a real Airflow supervises, on real Spark and MinIO, while rows come in."""

    def __init__(self, stack: Stack, feed: Path) -> None:
        self.stack, self.api, self.store = stack, ApiForTests.of(stack), open_store(stack.store_url)
        self.log = SlotLog(self.store, PIPELINE)
        self.drivers = stack.home / "drivers" / PIPELINE
        self._feed = Feed(feed, stack.store_url)
        self._feed.start()
        self.api.wait_for_dag(f"{PIPELINE}.stream")
        self._run = self.api.trigger_dag(f"{PIPELINE}.stream")
        _until(lambda: self.log.head().slot >= 2, 240)

    def holder(self) -> tuple[psutil.Process, int]:
        """The process that drives, and its token."""
        lease = read_lease(self.store, PIPELINE)
        assert lease is not None
        assert lease.holder is not None
        return psutil.Process(lease.holder.pid), lease.token

    def kill_driver(self) -> float:
        """kill -9 while the task sleeps; seconds to the next sealed epoch."""
        _until(lambda: self._task_state() == "deferred", 60)
        driver, token = self.holder()
        os.kill(driver.pid, SIGKILL)
        killed = time.monotonic()
        _until(lambda: _newest_token(self.log) > token, 240)
        return time.monotonic() - killed

    def kill_triggerer(self) -> None:
        """kill -9 while the task sleeps in it; the process manager starts another one.

        Returns when the stream is watched again.
        """
        _until(lambda: self._task_state() == "deferred", 60)
        watcher = self._triggerer_job()
        assert watcher is not None
        os.kill(StackState.load(self.stack.home / "stack.json").processes["triggerer"].pid, SIGKILL)
        self.stack.up(print)
        _until(lambda: self._triggerer_job() not in (None, watcher), 240)

    def finish(self) -> str:
        """Say that there is nothing more to come; the state in which the run ends."""
        self._feed.finish()
        run = self.api.wait_for_run(f"{PIPELINE}.stream", self._run, timeout=240)
        return str(run["state"])

    def exit_codes(self) -> list[str]:
        """Of the drivers that have ended, in the order of their launches."""
        return [file.read_text().strip() for file in sorted(self.drivers.glob("*.exit"))]

    def _task_state(self) -> str:
        return str(self._task()["state"])

    def _triggerer_job(self) -> int | None:
        """The job of the triggerer that watches the stream."""
        job = self._task().get("triggerer_job")
        return None if job is None else int(job["id"])

    def _task(self) -> dict[str, Any]:
        return self.api.task_instances(f"{PIPELINE}.stream", self._run)["stream"]


@pytest.fixture
def supervise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Supervised]]:
    """Start the stream with these options of `supervision`.

    The stack makes the connection to a local Spark master.
    """
    dags = tmp_path / "dags"
    (dags / "pipelines").mkdir(parents=True)
    shutil.copy(REPOSITORY / "dags" / "tidegate_dags.py", dags)
    stack = Stack(StackSettings(home=tmp_path / "home", dags=dags))

    def start(supervision: str) -> Supervised:
        text = f"{SPEC_OF_THE_FEED}supervision: {{{supervision}, retry_delay: 1s}}\n"
        (dags / "pipelines" / f"{PIPELINE}.yaml").write_text(text)
        write_feed(tmp_path / "feed", OBJECTS)
        stack.up(print)
        for key, value in stack.environment().items():
            monkeypatch.setenv(key, value)
        return Supervised(stack, tmp_path / "feed")

    try:
        yield start
    finally:
        stack.down(print)


def test_a_submitted_driver_is_supervised(supervise: Callable[[str], Supervised]) -> None:
    """The task submits, defers, submits again after kill -9, and ends green with the sources.

    When the triggerer is killed in between, the next one adopts the running driver: none is
    launched beside it, and its loss is noticed as before.
    """
    stream = supervise("submit: {conn_id: spark_default}")
    above = [parent.cmdline() for parent in stream.holder()[0].parents()]
    assert any("org.apache.spark.deploy.SparkSubmit" in line for line in above)
    assert any("tidegate.operators.spark_submission" in line for line in above)
    driver, token = stream.holder()
    stream.kill_triggerer()
    slot = stream.log.head().slot
    _until(lambda: stream.log.head().slot >= slot + 2, 120)
    assert stream.holder() == (driver, token)
    assert stream.exit_codes() == []
    print(f"submitted: kill -9 to the next sealed epoch: {stream.kill_driver():.1f} s")  # noqa: T201
    assert stream.finish() == "success"
    # The task is green when the sources have ended; spark-submit's JVM ends after its driver.
    _until(lambda: len(stream.exit_codes()) == 2, 60)
    assert stream.exit_codes() == ["137", "0"]


def test_a_standby_takes_over_and_is_replaced(supervise: Callable[[str], Supervised]) -> None:
    """Two drivers from the start; after each kill -9 the other drives, and a new one waits.

    When the sources have ended, the last standby ends by itself.
    """
    stream = supervise("standby: true")
    _await_drivers_standing_by(stream, 2)
    for kill in range(STANDBY_KILLS):
        seconds = stream.kill_driver()
        print(f"standby: kill -9 to the next sealed epoch: {seconds:.1f} s")  # noqa: T201
        _await_drivers_standing_by(stream, 3 + kill)
    assert stream.finish() == "success"
    _until(lambda: len(stream.exit_codes()) == 2 + STANDBY_KILLS, 60)
    fenced = str(FailureClass.FENCED.exit_code)
    assert sorted(stream.exit_codes()) == sorted(["0", fenced, *["137"] * STANDBY_KILLS])


def _await_drivers_standing_by(stream: Supervised, launches: int) -> None:
    """Wait until so many drivers have stood by, those that drive or are dead by now included."""
    event = '"event": "standing_by"'

    def all_have() -> bool:
        logs = [log.read_text(errors="replace") for log in stream.drivers.glob("*.log")]
        return sum(event in text for text in logs) == launches

    _until(all_have, 240)


def _newest_token(log: SlotLog) -> int:
    record = log.head().record
    return record.lease_token if record else 0


def _until(true: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not seen in {seconds:.0f} s"
        time.sleep(0.1)
