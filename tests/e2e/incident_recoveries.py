"""How each of the ten incidents begins, and what the person does (`tests.e2e.incidents`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from tests.e2e.incident_scene import Scene, Watch, utc
from tests.servers.processes import find_jvms

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
# Spark computes the rows of a source with a rule that DuckDB does not; the others start no JVM.
_RULES = "rules: {not_negative: {predicate: amount >= 0 and crc32(item) >= 0, severity: fail}}"
NAMES = ("killed", "away", "wiped", "future", "silent", "misdeployed", "upstream")
ILL = ("killed", "away", "silent", "misdeployed", "upstream")
SPECS = {name: _SPEC.format(name=name, more="") for name in NAMES} | {
    "metered": _SPEC.format(name="metered", more=_RULES)
}
FAR = datetime(2099, 1, 1, tzinfo=UTC)


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
    (jvm,) = find_jvms(holder.holder.pid)
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
    scene.picture("upstream", "#results")
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
