"""An Airflow task launches drivers by the Spark provider's hook, and keeps one alive."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGKILL

import psutil
import pytest

from tests.e2e.airflow_kills import PIPELINE, Feed
from tests.e2e.feed import SPEC, write_feed
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.infra.local_stack import Stack, StackSettings

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).resolve().parents[2]
SUPERVISED = (
    SPEC.replace("limits: {objects: 1}", "limits: {objects: 8}")
    + "supervision: {submit: {conn_id: spark_default}, retry_delay: 1s}\n"
)


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A real Airflow and MinIO; the stack makes the connection to a local Spark master."""
    dags = tmp_path / "dags"
    (dags / "pipelines").mkdir(parents=True)
    shutil.copy(REPOSITORY / "dags" / "tidegate_dags.py", dags)
    (dags / "pipelines" / f"{PIPELINE}.yaml").write_text(SUPERVISED)
    found = Stack(StackSettings(home=tmp_path / "home", dags=dags))
    try:
        found.up(print)
        for key, value in found.environment().items():
            monkeypatch.setenv(key, value)
        yield found
    finally:
        found.down(print)


def test_a_submitted_driver_is_supervised(stack: Stack, tmp_path: Path) -> None:
    """The task submits, defers, submits again after kill -9, and ends green with the sources."""
    write_feed(tmp_path / "feed", 300)
    feed = Feed(tmp_path / "feed", stack.store_url)
    feed.start()
    store, api = open_store(stack.store_url), stack.airflow_api()
    api.wait_for_dag(f"{PIPELINE}.stream")
    run = api.trigger_dag(f"{PIPELINE}.stream")
    log = SlotLog(store, PIPELINE)
    _until(lambda: log.head().slot >= 2, 240)
    first = read_lease(store, PIPELINE)
    assert first is not None
    assert first.holder is not None
    driver = psutil.Process(first.holder.pid)
    above = [parent.cmdline() for parent in driver.parents()]
    assert any("org.apache.spark.deploy.SparkSubmit" in line for line in above)
    assert any("tidegate.operators.spark_submission" in line for line in above)
    _until(
        lambda: api.task_instances(f"{PIPELINE}.stream", run)["stream"]["state"] == "deferred", 60
    )
    os.kill(driver.pid, SIGKILL)
    killed = time.monotonic()
    _until(lambda: _newest_token(log) > first.token, 240)
    print(f"kill -9 to the next sealed epoch: {time.monotonic() - killed:.1f} s")  # noqa: T201
    feed.finish()
    ended = api.wait_for_run(f"{PIPELINE}.stream", run, timeout=240)
    assert ended["state"] == "success"
    launched = sorted((stack.home / "drivers" / PIPELINE).glob("*.exit"))
    assert [file.read_text().strip() for file in launched] == ["137", "0"]


def _newest_token(log: SlotLog) -> int:
    record = log.head().record
    return record.lease_token if record else 0


def _until(true: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not seen in {seconds:.0f} s"
        time.sleep(0.1)
