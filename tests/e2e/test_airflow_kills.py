"""Everything a supervised stream consists of is killed, one after another.

No second driver, no green-but-dead minute, exact.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.airflow_kills import PIPELINE, Feed, Killer, Watch, table
from tests.e2e.feed import SPEC, write_feed
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.infra.local_stack import Stack, StackSettings
from tidegate.jobs.engine.recorded_epochs import read_kept_manifests
from tidegate.jobs.sinks.exactness_audit import audit_exactness
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.spec.loader import load_spec

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]

REPOSITORY = Path(__file__).resolve().parents[2]
SUPERVISED = (
    SPEC.replace("limits: {objects: 1}", "limits: {objects: 8}")
    + "supervision: {retries: 20, retry_delay: 1s}\n"
)
OBJECTS = 2400  # of each source, one a second: more than the kills can take


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A real Airflow, MinIO, and one pipeline on real Spark."""
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


def test_every_process_is_killed_once(stack: Stack, tmp_path: Path) -> None:
    """Each kill is noticed and overcome by itself.

    Drivers are launched as often as one was killed; the tables are exact.
    """
    write_feed(tmp_path / "feed", OBJECTS)
    feed = Feed(tmp_path / "feed", stack.store_url)
    feed.start()
    api = stack.airflow_api()
    api.wait_for_dag(f"{PIPELINE}.stream")
    run = api.trigger_dag(f"{PIPELINE}.stream")
    watch = Watch(stack, run)
    killer = Killer(stack, watch, print)
    killer.wait_until_running()
    watch.start()
    kills = [
        killer.driver(),
        killer.component("triggerer"),
        killer.component("scheduler"),
        killer.component("api-server"),
        killer.component("dag-processor"),
        killer.jvm(),
        killer.minio(),
        killer.worker(),
    ]
    feed.finish()
    ended = api.wait_for_run(f"{PIPELINE}.stream", run, timeout=900)
    watch.end()
    print(table(kills))  # noqa: T201 - docs/airflow.md quotes it
    asleep, at_work = (
        watch.well_but_dead("deferred", "success"),
        watch.well_but_dead("deferred", "success", "running"),
    )
    print(f"longest time well but dead: {at_work:.1f} s, of it asleep {asleep:.1f} s")  # noqa: T201
    assert ended["state"] == "success"
    assert asleep < 60
    assert at_work < 180, (
        "a worker that died at work is given up after half a minute; a busy scheduler looks later"
    )
    _one_driver_at_a_time(stack, launches=1 + sum(kill.drivers for kill in kills))
    _exact(stack, tmp_path / "dags" / "pipelines" / f"{PIPELINE}.yaml")


def _one_driver_at_a_time(stack: Stack, launches: int) -> None:
    """As many launches and leases as drivers that were killed, and every slot sealed by the lease
    that was on.
    """
    epochs = list(read_kept_manifests(SlotLog(open_store(stack.store_url), PIPELINE)))
    tokens = [epoch.lease_token for epoch in epochs]
    assert len(list((stack.home / "drivers" / PIPELINE).glob("*.json"))) == launches
    assert tokens == sorted(tokens)
    assert sorted(set(tokens)) == list(range(1, launches + 1))
    assert [epoch.slot for epoch in epochs] == list(range(1, len(epochs) + 1))
    assert {epoch.timeline for epoch in epochs} == {0}


def _exact(stack: Stack, file: Path) -> None:
    """Every row in one place, windows equal a recomputation, the newest epoch replayed gives the
    same rows.
    """
    spec, store = load_spec(file), open_store(stack.store_url)
    found = audit_exactness(
        spec,
        store,
        SlotLog(store, PIPELINE),
        lambda name: read_table(spec, store, name, current_only=True),
    )
    assert found.problems == []
    assert found.windows["per_minute"] > 100
    again = [
        sys.executable,
        "-m",
        "tidegate.jobs.cli",
        "replay",
        str(file),
        "--store",
        stack.store_url,
        "--json",
    ]
    replayed = subprocess.run(again, capture_output=True, text=True, timeout=900, check=False)
    assert json.loads(replayed.stdout)["data"]["equal"] is True, replayed.stdout + replayed.stderr
