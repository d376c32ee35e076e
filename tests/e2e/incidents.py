"""Ten incidents of docs/incidents.md, each recovered from the Streams page in a real Chromium.

    python -m tests.e2e.incidents [NAME...] [--pictures]     ends with "N of 10 recovered"

Airflow, MinIO, the drivers and the JVM are real; only the quality checks are replaced. An incident
counts as recovered if the page itself proves it (its panel "Is it over?") after at most 4 clicks
and 60 s. Clicks are counted on the page of the stream, and for the last incident on the list. Enter
in a form would count as one. The seconds run from the first click, or from the kill or the return
of what was away if no one has to click. Everything outside the page (a file that is edited, an
object that is replaced) is done before the first click, except for the wrong spec, where the stream
is stopped first. Afterwards the tables are compared with the input (`audit_exactness`).
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from playwright.sync_api import Locator, Page

from tests.e2e.browser import browser_of_the_machine
from tests.operators.conftest import FAKES, Cockpit, cockpit_of, database_of
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.sinks.exactness_audit import audit_exactness
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.spec.loader import load_spec

MAX_CLICKS, MAX_SECONDS = 4, 60.0
GIVE_UP = 300.0  # seconds after which no one waits for a recovery any more
PICTURES = Path(__file__).resolve().parents[2] / "docs" / "images"
_SPEC = """\
apiVersion: tidegate/v1
name: {name}
sources:
  web: &source
    path: inbox/{name}/web/
    schema: {{at: timestamp, item: string, amount: long}}
    event_time: at
    lag: 5s
    {more}
  shop: {{<<: *source, path: inbox/{name}/shop/}}
coalesce: {{idle_timeout: 5s}}
windows:
  per_minute:
    kind: tumbling
    size: 1m
    keys: [item]
    aggregates: {{n: count(*), total: sum(amount)}}
    lateness: 1m
sinks: {{lake: {{kind: files, path: lake/{name}, format: jsonl}}}}
checkpoint: {{idle_interval: 500ms}}
spark: {{driver_memory: 1g, jvm: quick}}
supervision: {{retries: 20, retry_delay: 1s, maintain: "0 0 31 12 *", sweep: "0 0 31 12 *"}}
"""
# Spark computes the rows of a source with rules; the others start no JVM.
_RULES = "rules: {not_negative: {predicate: amount >= 0, severity: fail}}"
NAMES = ("killed", "away", "wiped", "future", "silent", "misdeployed", "upstream")
ILL = ("killed", "away", "silent", "misdeployed", "upstream")
SPECS = {name: _SPEC.format(name=name, more="") for name in NAMES} | {
    "metered": _SPEC.format(name="metered", more=_RULES)
}
FAR = datetime(2099, 1, 1, tzinfo=UTC)


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


@dataclass(frozen=True)
class Outcome:
    """One line of the result.

    Attributes:
        steps: when Airflow's tasks and the drivers began, to tell their shares of the seconds.
    """

    name: str
    clicks: int
    seconds: float
    proof: list[str] = field(default_factory=list)
    trouble: str = ""
    steps: list[str] = field(default_factory=list)

    @property
    def recovered(self) -> bool:
        return not self.trouble and self.clicks <= MAX_CLICKS and self.seconds <= MAX_SECONDS


class Scene:
    """The stack, its feed, and one person at the Streams page."""

    def __init__(self, cockpit: Cockpit, page: Page, pictures: bool = False) -> None:
        self.cockpit, self.page, self.pictures = cockpit, page, pictures
        self.store, self.feed = cockpit.store, Feed(cockpit)
        self.feed.start()
        self.home = f"{cockpit.stack.airflow_url}/tidegate/page"

    # What happens outside the page.

    def start(self, *pipelines: str) -> None:
        """Start streams that do not run yet, and wait until each has sealed rows."""
        for name in pipelines:
            if self.cockpit.head(name) == 0:
                self.cockpit.known(f"{name}.stream")
                self.cockpit.known(f"{name}.recover")
                self.feed.open[name] = ("web", "shop")
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
        """Edit the spec's file."""
        file = self.spec_file(pipeline)
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

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


def recover_killed(scene: Scene, watch: Watch) -> list[str]:
    """Driver killed: Airflow launches the next one by itself."""
    scene.start("killed")
    scene.open("killed")
    watch.begin()
    scene.cockpit.kill("killed")
    lines = scene.proof(watch)
    scene.picture("killed")
    return lines


def recover_hung(scene: Scene, watch: Watch) -> list[str]:
    """JVM hung: the person has the driver replaced."""
    scene.start("metered")
    scene.open("metered")
    holder = scene.cockpit.holder("metered")
    assert holder is not None
    assert holder.holder is not None
    children = psutil.Process(holder.holder.pid).children(recursive=True)
    (jvm,) = [child for child in children if child.name() == "java"]
    jvm.suspend()
    slot = scene.cockpit.head("metered")
    scene.page.wait_for_timeout(15_000)
    assert scene.cockpit.head("metered") <= slot + 1
    scene.picture("hung")
    watch.press(scene.page.locator("#stop"))
    scene.page.locator("#why").fill("the JVM does not answer")
    watch.press(scene.page.locator("#replace"))
    watch.press(scene.page.locator("#dialog-go"))
    return scene.proof(watch)


def recover_away(scene: Scene, watch: Watch) -> list[str]:
    """Bucket away: it comes back, and every stream goes on by itself."""
    scene.start("away")
    scene.open("away")
    server = scene.cockpit.stack.minio_server()
    server.kill()
    scene.sees("could not be reached", "body")
    scene.page.wait_for_timeout(12_000)
    scene.picture("away")
    scene.cockpit.stack.up(print)
    watch.begin()
    return scene.proof(watch)


def recover_wiped(scene: Scene, watch: Watch) -> list[str]:
    """Bucket wiped: the page names what is lost; a start from nothing."""
    scene.start("wiped")
    scene.open("wiped")
    scene.feed.hold("wiped")
    scene.wipe("wiped")
    scene.sees("Lost: every checkpoint up to t0-")
    scene.picture("wiped")
    return scene.start_from_page(watch, "wiped")


def recover_poisoned(scene: Scene, watch: Watch) -> list[str]:
    """Poisoned row: the page names it; the object is repaired outside, then a start."""
    scene.start("metered")
    scene.open("metered")
    scene.feed.hold("metered")
    key = scene.feed.put("metered", amount=-7, count=False)
    scene.sees("failed", "header")
    scene.sees("not_negative")
    scene.picture("poisoned")
    scene.feed.put("metered", amount=7, key=key)
    return scene.start_from_page(watch, "metered")


def recover_future(scene: Scene, watch: Watch) -> list[str]:
    """Far-future stamp: the spec gets `max_jump` outside, then a restore to before it."""
    scene.start("future")
    scene.open("future")
    before = settle(scene, "future")
    scene.feed.put("future", at=FAR)
    scene.sees("far ahead of the clock")
    scene.page.wait_for_timeout(4_000)
    scene.picture("future")
    scene.edit("future", "    lag: 5s\n", "    lag: 5s\n    max_jump: 1d\n")
    return scene.restore_until(watch, before, "a row of the year 2099")


def recover_silent(scene: Scene, watch: Watch) -> list[str]:
    """Silent source: it becomes idle by its timer, and the others go on."""
    scene.start("silent")
    scene.open("silent")
    scene.feed.open["silent"] = ("web",)
    scene.sees("idle", "#sources")
    watch.begin()
    slot = scene.cockpit.head("silent")
    scene.until(lambda: scene.cockpit.head("silent") > slot + 1, "epochs without it")
    scene.page.wait_for_timeout(15_000)  # the page calls a return what follows 10 s of silence
    scene.picture("silent")
    scene.feed.open["silent"] = ("web", "shop")
    return scene.proof(watch, "active again")


def recover_misdeployed(scene: Scene, watch: Watch) -> list[str]:
    """Wrong spec deployed: stop, correct the file outside, restore to before it."""
    scene.start("misdeployed")
    scene.open("misdeployed")
    before = settle(scene, "misdeployed")
    scene.edit("misdeployed", "lag: 5s", "lag: 0s")
    token = scene.cockpit.kill("misdeployed")
    scene.until(lambda: scene.cockpit.token("misdeployed") > token, "the driver of the wrong spec")
    for _ in range(3):
        scene.feed.put("misdeployed", at=datetime.now(UTC) - timedelta(seconds=4))
        scene.page.wait_for_timeout(2_000)
    scene.sees("the spec changed", "#trail")
    scene.picture("misdeployed", "#trail")
    watch.press(scene.page.locator("#stop"))
    scene.page.locator("#why").fill("the lag is wrong")
    watch.press(scene.page.locator("#dialog-go"))
    scene.sees("Done", "#dialog")
    scene.page.keyboard.press("Escape")
    scene.edit("misdeployed", "lag: 0s", "lag: 5s")
    return scene.restore_until(watch, before, "the lag was wrong")


def recover_upstream(scene: Scene, watch: Watch) -> list[str]:
    """Bad upstream data, found after a day of events: corrected outside, then read again."""
    scene.start("upstream")
    scene.open("upstream")
    before = settle(scene, "upstream")
    bad = [scene.feed.put("upstream", amount=1_000_000) for _ in range(3)]
    for hour in range(1, 26):
        scene.feed.put("upstream", at=datetime.now(UTC) + timedelta(hours=hour))
        scene.feed.put("upstream", "shop", at=datetime.now(UTC) + timedelta(hours=hour))
        scene.page.wait_for_timeout(300)
    scene.until(lambda: scene.read_all("upstream"), "a day of events")
    for key in bad:
        scene.feed.put("upstream", key=key, count=False)
    return scene.restore_until(watch, before, "amounts in cents")


def recover_five(scene: Scene, watch: Watch) -> list[str]:
    """Five streams ill at once: one clock upstream is wrong; two drivers die, one is stopped."""
    scene.start(*ILL)
    for name in ILL:
        scene.feed.open[name] = ("web",) if name == "silent" else ("web", "shop")
    scene.open()
    scene.page.wait_for_timeout(10_000)
    before = max(settle(scene, name) for name in ILL)
    bad = {name: scene.feed.put(name, at=FAR) for name in ILL}
    scene.until(lambda: scene.page.locator(".findings", has_text="far ahead").count() >= 5, "five")
    scene.cockpit.kill("killed")
    scene.cockpit.kill("away")
    scene.cockpit.api.trigger_dag("upstream.stop")
    scene.until(lambda: scene.cockpit.holder("upstream") is None, "the stop of upstream")
    scene.picture("five")
    for name, key in bad.items():
        scene.feed.put(name, key=key, count=False)
    watch.press(scene.page.locator("#restore-several"))
    scene.page.locator("#restore-until").fill(utc(before))
    scene.page.locator("#why").fill("a wrong clock upstream")
    # The form also lists streams of other incidents, which are not ticked.
    targets = [f"#dialog tr:has(#also-{name}:checked) code.id" for name in ILL]
    scene.until(lambda: all(scene.page.locator(one).count() for one in targets), "five targets")
    watch.press(scene.page.locator("#dialog-go"))
    lines = []
    for name in ILL:
        scene.open(name)
        lines += [f"{name}: {line}" for line in scene.proof(watch, "after a restore")]
    return lines


def settle(scene: Scene, pipeline: str) -> float:
    """Wait for another epoch, and let a second pass, so that a time between two epochs exists."""
    slot = scene.cockpit.head(pipeline)
    scene.feed.put(pipeline)
    scene.until(lambda: scene.cockpit.head(pipeline) > slot, f"an epoch of {pipeline}")
    scene.feed.hold(pipeline)
    scene.until(lambda: scene.read_all(pipeline), f"all rows of {pipeline}")
    scene.page.wait_for_timeout(2_100)
    return time.time() - 1


INCIDENTS: dict[str, tuple[Callable[[Scene, Watch], list[str]], tuple[str, ...]]] = {
    "driver killed": (recover_killed, ("killed",)),
    "JVM hung": (recover_hung, ("metered",)),
    "bucket away": (recover_away, ("away",)),
    "bucket wiped": (recover_wiped, ("wiped",)),
    "poisoned row": (recover_poisoned, ("metered",)),
    "far-future stamp": (recover_future, ("future",)),
    "silent source": (recover_silent, ("silent",)),
    "wrong spec deployed": (recover_misdeployed, ("misdeployed",)),
    "bad upstream data": (recover_upstream, ("upstream",)),
    "five streams ill": (recover_five, ILL),
}


def play(scene: Scene, name: str) -> Outcome:
    """Let one incident happen, recover from it, and compare tables and input afterwards."""
    recover, pipelines = INCIDENTS[name]
    watch, proof, trouble, seconds, steps = Watch(), [], "", GIVE_UP, []
    try:
        proof = recover(scene, watch)
        seconds = time.time() - watch.since
        steps = list_steps(scene, pipelines, watch.since)
        for pipeline in pipelines:
            trouble = trouble or scene.compare(pipeline)
    except Exception as error:
        trouble = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        for pipeline in pipelines:
            scene.feed.hold(pipeline)
    return Outcome(name, watch.clicks, seconds, proof, trouble, steps)


@contextmanager
def scene_of(folder: Path, specs: dict[str, str], pictures: bool = False) -> Iterator[Scene]:
    """A stack with these pipelines, and a browser at its Streams page."""
    checks = {"TIDEGATE_CHECKS": FAKES["TIDEGATE_CHECKS"]}
    with (
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


def main() -> int:
    """Play the incidents that are asked for, by default all; 0 if all have recovered."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(INCIDENTS))
    parser.add_argument("--pictures", action="store_true")
    chosen = parser.parse_args()
    outcomes = []
    with (
        tempfile.TemporaryDirectory() as folder,
        scene_of(Path(folder), SPECS, chosen.pictures) as scene,
    ):
        for name in chosen.names:
            found = play(scene, name)
            outcomes.append(found)
            said = "recovered" if found.recovered else f"NOT recovered {found.trouble}"
            took = f"{found.clicks} clicks, {found.seconds:.0f} s (load {os.getloadavg()[0]:.1f})"
            sys.stdout.write(f"{name}: {said}, {took}\n")
            sys.stdout.writelines(f"    {line}\n" for line in (*found.proof, *found.steps))
            sys.stdout.flush()
    well = sum(outcome.recovered for outcome in outcomes)
    sys.stdout.write(f"{well} of {len(outcomes)} recovered\n")
    return 0 if well == len(outcomes) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
