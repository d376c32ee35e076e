"""A job of one's own under real Airflow, on real Spark and MinIO: kill -9, a restore, the page."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.e2e.browser import PATIENCE, browser_of_the_machine, needs_chromium
from tests.operators.conftest import Cockpit, cockpit_of, task_state
from tests.sealed_queries.apps import Clicks
from tests.sealed_queries.clicks import EXAMPLE, count_clicks, read_counts, read_files, write_clicks
from tidegate.checkpoints.batch_notes import BatchNotes
from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.operators.driver_launch import read_launch_record

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

_FILES = 6
_LONG = 10 * PATIENCE
_GREEN = ("success", "deferred")


class SupervisedJob:
    """The example job, its stream task, and what a watch has seen of both."""

    def __init__(self, cockpit: Cockpit, folder: Path) -> None:
        self.cockpit, self.out = cockpit, folder / "out"
        self.log = SlotLog(cockpit.store, "clicks")
        cockpit.known("clicks.stream")
        self.run = cockpit.api.trigger_dag("clicks.stream")
        cockpit.runs = {"clicks": self.run}
        self.kept_drivers = 1  # with a standby two
        self.dead_and_well = 0.0  # seconds, the longest
        self.states: Counter[str] = Counter()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()

    def positions(self) -> dict[str, int]:
        """Query -> newest sealed batch."""
        notes = BatchNotes.from_manifest(self.log.head().record)
        return {name: at.batch for name, at in notes.queries.items()} if notes else {}

    def is_complete(self) -> bool:
        """Whether all files are sealed in both queries.

        A batch without rows may follow, which moves the watermark; Spark does not run it again
        after a restore.
        """
        return Clicks.count_files(self.log.head().record) >= _FILES

    def outputs(self) -> tuple[object, object]:
        """What both sinks hold."""
        return read_counts(self.out), read_files(self.out)

    def drivers(self) -> int:
        """How many drivers Airflow has launched."""
        return len(list(self._folder.glob("*.json")))

    def end_watch(self) -> None:
        """No further looks."""
        self._over.set()
        self._watch.join()

    @property
    def _folder(self) -> Path:
        return self.cockpit.stack.home / "drivers" / "clicks"

    def _look(self) -> None:
        since = None
        while not self._over.wait(0.25):
            state = task_state(self.cockpit.stack, "clicks.stream", self.run)
            self.states[state] += 1
            records = map(read_launch_record, self._folder.glob("*.json"))
            if state in _GREEN and not any(record and record.is_alive() for record in records):
                since = since or time.monotonic()
                self.dead_and_well = max(self.dead_and_well, time.monotonic() - since)
            else:
                since = None


LAUNCHES: dict[str, dict[str, object]] = {
    "process": {},
    "submitted": {"submit": {"conn_id": "spark_default"}},
    "standby": {"standby": True},
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(how, marks=[pytest.mark.long] if LAUNCHES[how] else []) for how in LAUNCHES
    ],
)
def job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SupervisedJob]:
    """Airflow launches the example by `clicks.stream`, in one of three ways."""
    folder = tmp_path_factory.mktemp("own")
    write_clicks(folder / "in", _FILES)
    conf = {"spark.ui.enabled": "false", "spark.log.level": "ERROR"}
    spec = {
        "apiVersion": "tidegate/v1",
        "kind": "job",
        "name": "clicks",
        "app": str(EXAMPLE / "clicks.py"),
        "args": [str(folder / "in"), str(folder / "out")],
        "conf": conf,
        "supervision": {"retries": 20, "retry_delay": "1s", **LAUNCHES[request.param]},
    }
    with cockpit_of(folder, {"clicks": json.dumps(spec)}, fakes={}) as cockpit:
        found = SupervisedJob(cockpit, folder)
        found.kept_drivers = 2 if request.param == "standby" else 1
        yield found
        found.end_watch()


def test_a_killed_job_is_launched_again_and_restored_by_a_dag_run(job: SupervisedJob) -> None:
    """The task is not green while no driver lives, and each click is in both sinks once.

    A restore through a DAG run replays the same rows.
    """
    cockpit = job.cockpit
    cockpit.until(lambda: job.positions().get("per_minute", -1) >= 1, 120, "first batches")
    cockpit.until(lambda: cockpit.watched("clicks", job.run), 60, "a task that waits")
    token = cockpit.kill("clicks")
    cockpit.until(lambda: cockpit.token("clicks") > token, 120, "a second driver")
    cockpit.until(job.is_complete, 180, "the end of the input")
    cockpit.until(lambda: job.drivers() == 1 + job.kept_drivers, 60, "no driver too many")
    before = job.outputs()
    assert before[0] == count_clicks(job.out.parent / "in")
    target = CheckpointCatalog(job.log).list_checkpoints()[-3].id
    recover = cockpit.api.trigger_dag("clicks.recover", {"checkpoint": target, "reason": "test"})
    assert cockpit.ended("clicks.recover", recover, 240)["state"] == "success"
    cockpit.until(job.is_complete, 180, "the end of the input after the restore")
    assert job.log.head().timeline == 1
    assert job.outputs() == before
    assert job.states["success"] == 0
    assert job.dead_and_well < 60, "so long no driver lived, and the task looked well"


def test_the_quality_dag_checks_the_batches(job: SupervisedJob) -> None:
    """Great Expectations runs in a child of the task, over the sealed batches of both queries."""
    cockpit = job.cockpit
    cockpit.until(job.is_complete, 180, "the end of the input")
    run = cockpit.api.trigger_dag("clicks.quality")
    assert cockpit.ended("clicks.quality", run, 240)["state"] == "success"
    log = cockpit.log("clicks", run, "quality")
    assert "newest checkpoint looked at: t" in log
    prefix = BucketLayout("clicks").quality_prefix
    result = json.loads(cockpit.store.get(f"{prefix}results/latest.json").data)
    checked = {check["id"] for check in result["checks"]}
    assert checked >= {"batch_reported", "batch_time", "rows_dropped", "watermark_still"}
    assert result["verdict"] in ("pass", "warn")
    assert result["checkpoint"] is not None
    sealed = {row.id for row in CheckpointCatalog(job.log).list_checkpoints(all_timelines=True)}
    assert result["checkpoint"] in sealed


# In CI, the first test restores this job, `test_browser.py` restores on the page, and
# `tests/cli/test_texts.py` has what the report says of sinks.
@pytest.mark.long
@needs_chromium
def test_a_restore_on_the_page_names_the_sinks(job: SupervisedJob) -> None:
    """The page shows each query; the dialog says what happens to each sink; the rows come back."""
    cockpit = job.cockpit
    cockpit.until(job.is_complete, 180, "the end of the input")
    before = job.outputs()
    timeline = job.log.head().timeline
    with browser_of_the_machine() as browser:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.set_default_timeout(PATIENCE)
        token, url = cockpit.bearer("admin"), cockpit.stack.airflow_url
        context.add_cookies([{"name": "_token", "value": token, "url": url}])
        page = context.new_page()
        page.goto(f"{cockpit.stack.airflow_url}/tidegate/page#/clicks")
        expect(page.locator("#queries")).to_contain_text("per_minute")
        expect(page.locator("#queries")).to_contain_text("FileSink")
        row = page.locator("#checkpoints tbody tr").nth(2)
        row.hover()
        row.get_by_role("button", name="Restore").click()
        dialog = page.get_by_role("dialog", name="Restore clicks")
        expect(dialog.locator(".report")).to_contain_text("per_minute", timeout=PATIENCE)
        expect(dialog.locator(".report")).to_contain_text("on_restore")
        dialog.get_by_label("Reason").fill("a wrong rate")
        dialog.get_by_role("button", name="Restore", exact=True).click()
        expect(dialog).to_contain_text("Done.", timeout=_LONG)
    assert job.log.head().timeline == timeline + 1
    cockpit.until(job.is_complete, 180, "the end of the input after the restore")
    assert job.outputs() == before
