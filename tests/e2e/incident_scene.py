"""The stack, the feed and the person of the incidents (`tests.e2e.incidents`)."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from playwright.sync_api import Locator, Page

from tests.e2e.browser import browser_of_the_machine
from tests.e2e.drivers import deploy_file
from tests.operators.conftest import FAKES, Cockpit, cockpit_of, database_of
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.sinks.exactness_audit import audit_exactness
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.spec.loader import load_spec

GIVE_UP = 300.0  # seconds after which no one waits for a recovery any more
PICTURES = Path(__file__).resolve().parents[2] / "docs" / "images"


class Feed(threading.Thread):
    """Puts an object into each open source every two seconds, through any outage of the store.

    Attributes:
        open: pipeline -> its sources that deliver at present.
        rows: pipeline -> rows put so far.
    """

    def __init__(self, cockpit: Cockpit) -> None:
        super().__init__(name="feed", daemon=True)
        self._cockpit, self._over, self._number = cockpit, threading.Event(), 0
        self._lock = threading.Lock()
        self.open: dict[str, tuple[str, ...]] = {}
        self.rows: dict[str, int] = {}

    def run(self) -> None:
        while not self._over.wait(2.0):
            with self._lock:
                for pipeline, sources in list(self.open.items()):
                    for source in sources:
                        self.put(pipeline, source)

    def hold(self, pipeline: str) -> None:
        """Let no further object of the pipeline come."""
        with self._lock:
            self.open.pop(pipeline, None)

    def end(self) -> None:
        self._over.set()
        self.join()

    def put(
        self,
        pipeline: str,
        source: str = "web",
        *,
        at: datetime | None = None,
        amount: int = 1,
        key: str = "",
        count: bool = True,
    ) -> str:
        """Put one object of ten rows, the times of which go back from `at` by a second each."""
        self._number += 1
        key = key or f"inbox/{pipeline}/{source}/{self._number:06d}.parquet"
        newest = (at or datetime.now(UTC)).replace(microsecond=0)
        times = [newest - timedelta(seconds=second) for second in range(10)]
        rows = {
            "at": pa.array(times, pa.timestamp("us", tz="UTC")),
            "item": ["a", "b"] * 5,
            "amount": pa.array([amount] * 10, pa.int64()),
        }
        data = io.BytesIO()
        pq.write_table(pa.table(rows), data)
        while True:
            try:
                self._cockpit.store.put(key, data.getvalue())
            except Exception:
                if self._over.wait(0.5):
                    return key
            else:
                break
        self.rows[pipeline] = self.rows.get(pipeline, 0) + (10 if count else 0)
        return key


@dataclass
class Watch:
    """Counts clicks and seconds of one incident; `since` is a time of the wall clock."""

    clicks: int = 0
    since: float = 0.0

    def begin(self) -> None:
        """The seconds run from here, unless they run already."""
        self.since = self.since or time.time()

    def press(self, what: Locator) -> None:
        self.begin()
        self.clicks += 1
        what.click(timeout=60_000)


class Scene:
    """The stack, its feed, and one person at the Streams page."""

    def __init__(self, cockpit: Cockpit, page: Page, pictures: bool = False) -> None:
        self.cockpit, self.page, self.pictures = cockpit, page, pictures
        self.store, self.feed = cockpit.store, Feed(cockpit)
        self.feed.start()
        self.home = f"{cockpit.stack.airflow_url}/tidegate/page"

    # What happens outside the page.

    def start(self, *pipelines: str) -> None:
        """Let objects come, start streams that do not run yet, wait until each has sealed rows."""
        for name in pipelines:
            # An earlier incident with the same stream has held them, in whatever order they come.
            self.feed.open[name] = ("web", "shop")
            if self.cockpit.head(name) == 0:
                self.cockpit.known(f"{name}.stream")
                self.cockpit.known(f"{name}.recover")
                self.cockpit.runs[name] = self.cockpit.api.trigger_dag(f"{name}.stream")
        for name in pipelines:
            self.until(partial(self._has_epochs, name), f"epochs of {name}")

    def _has_epochs(self, name: str) -> bool:
        return self.cockpit.head(name) >= 3

    def until(self, true: Callable[[], object], what: str, seconds: float = GIVE_UP) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not seen in {seconds:.0f} s: {what}")
            self.page.wait_for_timeout(200)

    def edit(self, pipeline: str, old: str, new: str) -> None:
        """Edit the spec's file and deploy it."""
        file = self.spec_file(pipeline)
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        deploy_file(self.store, file)

    def spec_file(self, pipeline: str) -> Path:
        return self.cockpit.stack.settings.dags / "pipelines" / f"{pipeline}.yaml"

    def wipe(self, pipeline: str) -> None:
        """Delete everything of the pipeline, source objects and sink included.

        Again until its driver has ended, as it may write until then; its last words stay.
        """
        kept: tuple[str, ...] = ()
        while True:
            driven = self.cockpit.holder(pipeline) is not None
            for prefix in (f"{pipeline}/", f"inbox/{pipeline}/", f"lake/{pipeline}/"):
                for entry in list(self.store.list_objects(prefix)):
                    if not entry.key.startswith(kept or "/"):
                        self.store.delete(entry.key)
            kept = (f"{pipeline}/status.json", f"{pipeline}/logs/")
            self.page.wait_for_timeout(1_000)
            said = "Lost: every checkpoint" in self.page.locator("main").inner_text()
            if not driven and said:
                break
        self.feed.rows[pipeline] = 0

    def read_all(self, pipeline: str) -> bool:
        """Whether everything that was put is read, and in the tables."""
        record = SlotLog(self.store, pipeline).head().record
        return record is not None and record.counters.read == self.feed.rows[pipeline]

    def compare(self, pipeline: str) -> str:
        """What the tables and the input do not agree in; empty if they are exact."""
        self.feed.hold(pipeline)
        self.until(lambda: self.read_all(pipeline), f"all rows of {pipeline}")
        spec, log = load_spec(self.spec_file(pipeline)), SlotLog(self.store, pipeline)

        def table(name: str) -> pa.Table:
            return read_table(spec, self.store, name, current_only=True)

        self.until(
            lambda: not audit_exactness(spec, self.store, log, table).problems, "exact tables", 60
        )
        return ""

    # What the person sees and does.

    def open(self, pipeline: str = "") -> None:
        """Go to a stream's page, as the link in an alert does, or to the list."""
        self.page.goto(f"{self.home}#/{pipeline}")
        self.page.locator("h1", has_text=pipeline or "Streams").wait_for()

    def sees(self, text: str, where: str = "main", seconds: float = GIVE_UP) -> None:
        self.until(lambda: text in self.page.locator(where).inner_text(), f"“{text}”", seconds)

    def picture(self, name: str, panel: str = "") -> None:
        """Save what the person sees, or only one panel of it, for docs/incidents.md."""
        if self.pictures:
            shown = self.page.locator(panel) if panel else self.page
            found = Image.open(io.BytesIO(shown.screenshot())).convert("RGB")
            file = PICTURES / f"incident-{name}.png"
            # A third of the size.
            found.quantize(64, dither=Image.Dither.NONE).save(file, optimize=True)

    def start_from_page(self, watch: Watch, pipeline: str) -> list[str]:
        """Let objects come again and start the stream; the proof that it is well."""
        self.feed.open[pipeline] = ("web", "shop")
        watch.press(self.page.locator("#start"))
        watch.press(self.page.locator("#dialog-go"))
        return self.proof(watch)

    def restore_until(self, watch: Watch, at: float, why: str) -> list[str]:
        """Restore the newest checkpoint that was sealed until then; the proof of it."""
        self.page.locator("#until").fill(utc(at))
        self.page.locator("#until").press("Tab")
        newest = self.page.locator("#checkpoints time[data-at]")

        def listed() -> bool:
            return (
                newest.count() > 0
                and float(str(newest.first.get_attribute("data-at"))) <= at * 1000
            )

        self.until(listed, "checkpoints of that time")
        watch.press(self.page.locator("[id^=restore-t]").first)
        self.page.locator("#why").fill(why)
        self.sees("Taken back", "#dialog")
        self.picture("restore")
        watch.press(self.page.locator("#dialog-go"))
        return self.proof(watch, "after a restore")

    def proof(self, watch: Watch, how: str = "") -> list[str]:
        """Wait until the panel proves that the stream is well again; its lines.

        Args:
            watch: of the incident.
            how: what the panel has to say of the first epoch. A driver that Airflow launched just
                before a restore may seal an epoch that the restore takes back.
        """
        panel = self.page.locator("#proof")

        def proven() -> bool:
            lines = panel.locator("li")
            kinds = [str(line.get_attribute("data-proof")) for line in lines.all()]
            if not {"first", "tables", "sink", "count"} <= set(kinds) or panel.is_hidden():
                return False
            first = panel.locator("[data-proof=first]")
            if how not in first.inner_text():
                return False
            at = first.locator("time[data-at]").first.get_attribute("data-at")
            return int(str(at)) > watch.since * 1000 and panel.locator("li:not(.good)").count() == 0

        self.until(proven, "the proof")
        return [line.inner_text().strip() for line in panel.locator("li").all()]


def list_steps(scene: Scene, pipelines: tuple[str, ...], since: float) -> list[str]:
    """When Airflow queued, started and ended tasks, and drivers were launched and sealed."""
    found: list[tuple[float, str]] = []
    with database_of(scene.cockpit.stack) as database:
        asked = "SELECT dag_id, queued_dttm, start_date, end_date FROM task_instance"
        for dag, *times in database.execute(asked):
            if dag.partition(".")[0] in pipelines:
                words = zip(("queued", "started", "ended"), times, strict=True)
                found += [(_read_time(time), f"{dag} {word}") for word, time in words if time]
    for name in pipelines:
        folder = scene.cockpit.stack.home / "drivers" / name
        found += [(file.stat().st_mtime, f"{name} launched") for file in folder.glob("*.json")]
        log = SlotLog(scene.store, name)
        head = log.head()
        epochs = log.epochs_between(head.timeline, 1, head.slot)
        sealed = [each.epoch.created_at / 1e6 for each in epochs]
        found += [(at, f"{name} sealed") for at in sealed if at > since][:1]
    return [f"{at - since:5.1f} s {what}" for at, what in sorted(found) if at >= since - 1]


def _read_time(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def utc(at: float) -> str:
    """As the page's fields take it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S")


@contextmanager
def cached_byte_code(folder: Path) -> Iterator[None]:
    """Let child processes keep what they have compiled, in the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        patch.setenv("PYTHONPYCACHEPREFIX", str(folder))
        yield


@contextmanager
def scene_of(folder: Path, specs: dict[str, str], pictures: bool = False) -> Iterator[Scene]:
    """A stack with these pipelines, and a browser at its Streams page.

    Byte code is cached in the folder, as an installed package has it. Where the environment forbids
    to write any, each process of Airflow and each driver would compile all its modules first: 4 s
    of processor time instead of 1.2 s for a driver.
    """
    checks = {"TIDEGATE_CHECKS": FAKES["TIDEGATE_CHECKS"]}
    with (
        cached_byte_code(folder / "pycache"),
        cockpit_of(folder, specs, fakes=checks) as cockpit,
        browser_of_the_machine() as browser,
    ):
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        context.set_default_timeout(60_000)
        url = cockpit.stack.airflow_url
        context.add_cookies([{"name": "_token", "value": cockpit.bearer("uwe"), "url": url}])
        scene = Scene(cockpit, context.new_page(), pictures)
        try:
            yield scene
        finally:
            scene.feed.end()
