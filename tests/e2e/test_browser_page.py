"""The Streams page in a real Chromium, served without Airflow.

How it looks, reads, and bears a missing bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.cli.shop import OBJECTS, Shop
from tests.cli.shop import SPEC as SHOP_SPEC
from tests.e2e.browser import (
    PATIENCE,
    browser_of_the_machine,
    needs_chromium,
    strange_requests,
    wide,
)
from tests.operators.history import GALLERY, History, gallery, keep_spec
from tests.operators.pages import FakeAirflowQueries, app_of, served
from tests.sealed_queries.conftest import JobBench
from tests.servers.memory_store import Fault, MemoryStore, StoreRequest
from tests.yardstick import slowness
from tidegate.checkpoints.batch_notes import BatchReport
from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.checkpoint_specs import write_spec
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.restore import RestoreEvent, record_restore_event
from tidegate.jobs.spec.loader import parse_spec

pytestmark = [pytest.mark.e2e, pytest.mark.slow, needs_chromium, pytest.mark.timeout(1800)]

Open = Callable[..., Page]

# Contrast of what is written against what lies behind it, as WCAG computes it, over every element
# with text of its own.
_CONTRAST = """() => {
  const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true}), known = {};
  const rgb = text => {
    if (known[text]) return known[text];
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    return known[text] = [...pen.getImageData(0, 0, 1, 1).data];
  };
  const linear = v => v / 255 <= .04045 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const found = rgb(getComputedStyle(node).backgroundColor);
      if (found[3] > 250) return found;
    }
    return rgb(getComputedStyle(document.body).backgroundColor);
  };
  const found = [];
  for (const node of document.querySelectorAll("main *")) {
    const own = [...node.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || node.disabled || node.closest(".unseen, .mark, option") || !node.checkVisibility()) continue;
    const style = getComputedStyle(node), svg = node instanceof SVGElement;
    const a = light(rgb(svg ? style.fill : style.color)), b = light(behind(svg ? node.closest("div") : node));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${node.outerHTML.slice(0, 100)}`);
  }
  return found;
}"""
_NAMELESS = """() => [...document.querySelectorAll("button, select, input, a, table, svg[role=img], section")]
  .filter(n => n.closest("main") && !(n.getAttribute("aria-label") || n.getAttribute("aria-labelledby")
    || n.textContent.trim() || n.labels?.[0]?.textContent.trim())).map(n => n.outerHTML.slice(0, 100))"""
_TWICE = """() => [...document.querySelectorAll("[id]")].map(n => n.id).filter((id, i, ids) => ids.indexOf(id) !== i)"""


@dataclass
class Site:
    """The gallery, served."""

    url: str
    alive: History
    desk: FakeAirflowQueries
    store: MemoryStore
    fault: Fault | None = None


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """Seven streams in all states, on a store that can be taken away."""

    store = MemoryStore()

    def hook(request: StoreRequest) -> Fault | None:
        return found.fault

    # The page has a client of its own: what it cannot reach, the drivers go on with.
    desk = FakeAirflowQueries(GALLERY, MemoryStore(store.bucket, hook=hook), paused=["orders"])
    found = Site("", gallery(store, 90), desk, store)
    with served(app_of(desk)) as url:
        found.url = f"{url}/page"
        yield found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One for all tests."""
    with browser_of_the_machine() as browser:
        yield browser


@pytest.fixture
def show(chromium: Browser, site: Site) -> Iterator[Open]:
    """Opens a page in a window of its own and fails when anything on it went wrong."""
    contexts, strange = [], []

    def open_page(
        fragment: str = "", *, width: int = 1280, scheme: str = "light", quiet: bool = True
    ) -> Page:
        look: dict[str, Any] = {
            "color_scheme": scheme,
            "reduced_motion": "reduce",
        }  # or colours are caught between two
        context = chromium.new_context(viewport={"width": width, "height": 844}, **look)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        if quiet:
            strange.append(strange_requests(page, site.url.removesuffix("/page")))
        page.goto(site.url + fragment)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [found for part in strange for found in part] == []


def test_what_is_wrong_comes_first(show: Open) -> None:
    """The list is sorted by trouble, says why, and can be narrowed to a word or a state."""
    page = show()
    rows = page.locator("tr[data-pipeline]")
    expect(rows).to_have_count(7)
    names = rows.evaluate_all("rows => rows.map(row => row.dataset.pipeline)")
    assert names == ["meters", "orders", "taxis", "flights", "weather", "clicks", "tides"]
    expect(rows.nth(1)).to_contain_text("its DAG is paused in Airflow")
    page.get_by_role("button", name="Well 2").click()
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="Well 2").click()
    page.get_by_role("searchbox").fill("row 17 of inbox")
    expect(rows).to_have_count(1)
    page.get_by_role("searchbox").fill("no such thing")
    page.get_by_role("button", name="Show all").click()
    expect(rows).to_have_count(7)


def test_a_new_checkpoint_is_shown_within_five_seconds(show: Open, site: Site) -> None:
    """The page lives: it shows what was sealed five seconds later, and the chart goes on.

    On a machine with other work the least of several waits counts: the page has no part in the
    others.
    """
    page = show("#/flights")
    page.wait_for_selector("#sources svg")
    waits: list[float] = []
    while not waits or (len(waits) < 6 and min(waits) >= 5):
        epoch = site.alive.epoch(time.time())
        begun = time.monotonic()
        expect(page.locator(".facts")).to_contain_text(str(epoch.id), timeout=PATIENCE)
        waits.append(time.monotonic() - begun)
        expect(page.locator("#checkpoints tbody tr").first).to_contain_text(
            str(epoch.id), timeout=PATIENCE
        )
    assert min(waits) < 5 * slowness(), waits


@pytest.mark.parametrize("fragment", ["", "#/flights"])
def test_it_fits_and_can_be_read(show: Open, fragment: str) -> None:
    """On a small phone and a laptop, by day and by night.

    Nothing sticks out, and all text has a contrast of 4.5.
    """
    for width in (320, 390, 1280):
        page = show(fragment, width=width)
        page.wait_for_selector("#checkpoints tbody tr" if fragment else "tr[data-pipeline]")
        schemes: list[tuple[Literal["light", "dark"], str]] = [
            ("light", "rgb(245, 247, 249)"),
            ("dark", "rgb(15, 21, 27)"),
        ]
        for scheme, background in schemes:
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
            assert wide(page) == []
            assert page.evaluate(_CONTRAST) == []


def test_airflow_s_choice_of_theme_wins(show: Open) -> None:
    """Someone who chose dark in Airflow gets a dark page on a light system, and at once when they
    change it.
    """
    page = show(scheme="light")
    page.evaluate("localStorage.setItem('theme', 'dark')")
    page.reload()
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(15, 21, 27)"
    page.evaluate(
        "localStorage.setItem('theme', 'light'); dispatchEvent(new StorageEvent('storage'))"
    )
    assert page.evaluate(background) == "rgb(245, 247, 249)"


def test_everything_can_be_done_by_keyboard(show: Open) -> None:
    """Tab, Enter and arrows lead from the list to a chart's numbers and to the restore form, and
    Escape leads back.
    """
    page = show()
    page.wait_for_selector("tr[data-pipeline]")
    _tab_to(page, "open-flights")
    page.keyboard.press("Enter")
    page.wait_for_selector("#checkpoints tbody tr")
    assert page.evaluate("document.activeElement.id") == "main"
    _tab_to(page, lambda at: at["tag"] == "svg")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(
        "Frontier of each source"
    )
    page.keyboard.press("Home")
    expect(page.locator("#sources .readout").first).to_contain_text("epoch ")
    button = _tab_to(page, lambda at: at["id"].startswith("restore-"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Restore flights")).to_be_visible()
    assert page.evaluate("document.activeElement.id") == "why"
    expect(page.locator(".report")).to_contain_text("Taken back")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert page.evaluate("document.activeElement.id") == button


def test_listeners_get_names(show: Open) -> None:
    """Every control has a name, every table a heading, every chart a sentence.

    The outline begins with one heading.
    """
    page = show("#/flights")
    page.wait_for_selector("#checkpoints tbody tr")
    assert page.evaluate("document.querySelectorAll('h1').length") == 1
    assert page.evaluate(_NAMELESS) == []
    assert page.evaluate(_TWICE) == []


def test_a_table_does_not_move_while_a_person_chooses_in_it(show: Open, site: Site) -> None:
    """A row must not move under the pointer that is about to restore it.

    Newer checkpoints are announced instead.
    """
    page = show("#/flights")
    row = page.locator("#checkpoints tbody tr").nth(2)
    row.hover()
    before = row.locator("code").inner_text()
    for _ in range(2):
        site.alive.epoch(time.time())
    expect(page.locator(".fresh")).to_contain_text("newer checkpoint")
    assert row.locator("code").inner_text() == before
    page.locator("#fresh").click()
    expect(page.locator("#checkpoints tbody tr").nth(4).locator("code")).to_have_text(before)


def test_old_checkpoints_are_a_few_keys_away(show: Open) -> None:
    """The table is paged to the first epoch, also across a restore.

    What the restore left behind has a table of its own.
    """
    page = show("#/flights")
    first = page.locator("#checkpoints tbody tr").first
    page.locator("#page-older").click()
    page.locator("#page-newest").wait_for()
    while page.locator("#page-older").is_enabled():
        before = first.inner_text()
        page.locator("#page-older").click()
        expect(first).not_to_have_text(before, use_inner_text=True)
    expect(page.locator("#checkpoints tbody tr").last).to_contain_text("t0-000001")
    page.locator("#which").select_option("abandoned")
    expect(first).to_contain_text("left behind")
    expect(first).to_contain_text("t0-000270")


def test_two_checkpoints_are_compared(show: Open) -> None:
    """Rows, frontiers and tables that differ, against the one before, the newest, a pin."""
    page = show("#/flights")
    page.locator("[id^=diff-]").nth(3).click()
    dialog = page.get_by_role("dialog", name="What differs")
    expect(dialog).to_contain_text("Rows, here less there")
    dialog.locator("#other").select_option("before_fix")
    expect(dialog).to_contain_text("output.inputs.EWR.frontier")


def test_a_bucket_that_is_away_takes_nothing_from_the_page(show: Open, site: Site) -> None:
    """What was seen stays, with its age and the reason above it.

    When the bucket is back, so is the page.
    """
    page, lists = show("#/flights", quiet=False), show(quiet=False)
    page.wait_for_selector("#checkpoints tbody tr")
    lists.wait_for_selector("tr[data-pipeline]")
    site.fault = Fault.REFUSED
    try:
        expect(page.get_by_role("alert")).to_contain_text("What you see is from")
        expect(page.locator("h1")).to_have_text("flights")
        expect(lists.locator("tr[data-pipeline] .pill", has_text="unknown")).to_have_count(7)
    finally:
        site.fault = None
    expect(page.get_by_role("alert")).to_have_text("")
    expect(lists.locator("tr[data-pipeline=flights] .pill")).to_have_text("●running")


def test_what_a_busy_airflow_refuses_is_asked_again(show: Open) -> None:
    """A restore is asked for under one id until Airflow says that it has it, and goes on to its
    end.
    """
    page, asked, answers = show("#/flights", quiet=False), list[str](), [500, 503, 409]

    def airflow(route: Route) -> None:
        if route.request.method == "POST":
            asked.append(route.request.post_data_json["dag_run_id"])  # type: ignore[index]
            route.fulfill(status=answers[len(asked) - 1], json={"detail": "database is locked"})
        else:
            tasks = route.request.url.endswith("/taskInstances")
            route.fulfill(json={"task_instances": []} if tasks else {"state": "success"})

    page.route("**/api/v2/dags/**", airflow)
    row = page.locator("#checkpoints tbody tr").nth(2)
    row.hover()
    row.get_by_role("button", name="Restore").click()
    dialog = page.get_by_role("dialog", name="Restore flights")
    dialog.get_by_label("Reason").fill("a bad object came in")
    dialog.get_by_role("button", name="Restore").click()
    expect(dialog).to_contain_text("Done.")
    assert (len(asked), len(set(asked))) == (3, 1)


def _answer_starts(page: Page) -> list[dict[str, Any]]:
    """Airflow starts every run, which goes on; what was asked for."""
    asked: list[dict[str, Any]] = []

    def airflow(route: Route) -> None:
        if route.request.method == "POST":
            body = route.request.post_data_json
            assert isinstance(body, dict)
            asked.append({"url": route.request.url.partition("/dags/")[2], "conf": body["conf"]})
        tasks = route.request.url.endswith("/taskInstances")
        route.fulfill(json={"task_instances": []} if tasks else {"state": "running"})

    page.route("**/api/v2/dags/**", airflow)
    return asked


def test_a_stream_is_started_and_stopped_where_its_state_is_shown(show: Open) -> None:
    """Two clicks each; every one is a run of a DAG, and a reason goes with the stop."""
    page = show("#/clicks", quiet=False)
    asked = _answer_starts(page)
    page.get_by_role("button", name="Start…").click()
    dialog = page.get_by_role("dialog", name="Start clicks")
    dialog.get_by_role("button", name="Start").click()
    expect(dialog).to_contain_text("Airflow has begun")
    page = show("#/flights", quiet=False)
    stops = _answer_starts(page)
    page.get_by_role("button", name="Stop…").click()
    dialog = page.get_by_role("dialog", name="Stop flights")
    dialog.get_by_label("Reason").fill("release")
    dialog.get_by_role("button", name="Stop").click()
    expect(dialog).to_contain_text("running")
    assert asked == [{"url": "clicks.stream/dagRuns", "conf": {}}]
    page = show("#/flights", quiet=False)
    replaced = _answer_starts(page)
    page.get_by_role("button", name="Stop…").click()
    page.get_by_label("It hangs").check()
    page.get_by_role("button", name="Replace the driver").click()
    expect(page.get_by_role("dialog")).to_contain_text("running")
    stop = {"reason": "release", "replace": False}
    assert stops == [{"url": "flights.stop/dagRuns", "conf": stop}]
    assert replaced[0]["conf"] == {"reason": "", "replace": True}


def test_several_streams_are_restored_to_one_time(show: Open) -> None:
    """Two clicks for all that need attention; each goes to its own checkpoint of that time."""
    page = show(quiet=False)
    asked = _answer_starts(page)
    page.get_by_role("button", name="Restore several…").click()
    dialog = page.get_by_role("dialog", name="Restore several streams")
    ticked = dialog.locator("input[type=checkbox]:checked")
    assert {str(box.get_attribute("id")) for box in ticked.all()} == {
        "also-meters",
        "also-orders",
        "also-taxis",
    }
    at = time.gmtime(time.time() - 5)
    dialog.get_by_label("Sealed until (UTC)").fill(time.strftime("%Y-%m-%dT%H:%M:%S", at))
    dialog.get_by_label("Reason").fill("a wrong clock upstream")
    expect(dialog.locator("code.id")).to_have_count(6)
    dialog.get_by_role("button", name="Restore them").click()
    expect(dialog.locator(".note")).to_have_count(3)
    urls = sorted(one["url"] for one in asked)
    assert urls == [f"{name}.recover/dagRuns" for name in ("meters", "orders", "taxis")]
    assert len({one["conf"]["checkpoint"] for one in asked}) == 3


def test_runs_are_asked_for_one_after_another(show: Open) -> None:
    """Airflow's server on SQLite answers two such requests at once with a long wait and an error."""
    page = show(quiet=False)
    asked: list[Route] = []
    page.route("**/api/v2/dags/*/dagRuns", lambda route: asked.append(route))
    page.get_by_role("button", name="Restore several…").click()
    dialog = page.get_by_role("dialog", name="Restore several streams")
    at = time.gmtime(time.time() - 5)
    dialog.get_by_label("Sealed until (UTC)").fill(time.strftime("%Y-%m-%dT%H:%M:%S", at))
    dialog.get_by_label("Reason").fill("a wrong clock upstream")
    expect(dialog.locator("code.id")).to_have_count(6)
    dialog.get_by_role("button", name="Restore them").click()
    for number in range(3):
        page.wait_for_timeout(500)
        assert len(asked) == number + 1
        asked[number].fulfill(status=403, json={"detail": "no"})


def test_a_late_answer_about_another_time_is_not_restored(show: Open) -> None:
    """A person who corrects the time gets the checkpoints of the corrected time."""
    page = show(quiet=False)
    held: list[Route] = []
    streams = len(GALLERY) - 1  # one has no checkpoint
    page.get_by_role("button", name="Restore several…").click()
    dialog = page.get_by_role("dialog", name="Restore several streams")
    shown = dialog.locator("code.id")
    times = (time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - n)) for n in (5, 970))
    page.route(
        "**/checkpoints?limit=1*",
        lambda route: held.append(route) if len(held) < streams else route.continue_(),
    )
    dialog.get_by_label("Sealed until (UTC)").fill(next(times))
    while len(held) < streams:
        page.wait_for_timeout(50)
    dialog.get_by_label("Sealed until (UTC)").fill(next(times))
    expect(dialog.get_by_text("nothing was sealed until then").first).to_be_visible()
    expect(dialog.get_by_text("Looking…")).to_have_count(0)
    wanted = shown.evaluate_all("ids => ids.map(id => id.title)")
    with page.expect_response(lambda answer: "taxis.stream/impact" in answer.url):
        for route in held:
            route.continue_()
    page.wait_for_timeout(500)
    assert shown.evaluate_all("ids => ids.map(id => id.title)") == wanted


def test_who_may_restore_nothing_is_not_offered_it(show: Open, site: Site) -> None:
    """The list has no button that Airflow would refuse."""
    expect(show().get_by_role("button", name="Restore several…")).to_be_visible()
    site.desk.may.remove("recover")
    try:
        page = show()
        page.locator("tr[data-pipeline]").first.wait_for()
        expect(page.get_by_role("button", name="Restore several…")).to_be_hidden()
    finally:
        site.desk.may.append("recover")


def test_a_code_leads_to_its_documentation(show: Open, site: Site) -> None:
    """One row for each code, under an anchor."""
    page = show()
    page.goto(f"{site.url.removesuffix('/page')}/errors#store.wiped")
    expect(page.locator("[id='store.wiped']")).to_contain_text("the store has forgotten")


def test_a_failed_stream_tells_all_in_one_place(show: Open, site: Site) -> None:
    """The banner opens error, class, what was kept, the end of the log and the runs."""
    piece = BucketLayout("meters").attempt_logs_prefix("20260101-a") + "000000.log"
    site.store.put(piece, b"first line\nlast line\n")
    page = show("#/meters")
    page.get_by_role("button", name="Error, log and run").click()
    dialog = page.get_by_role("dialog", name="Why meters failed")
    expect(dialog).to_contain_text("mend the object")
    expect(dialog.locator("div", has_text="Line of the spec").locator("code").last).to_have_text(
        "/specs/meters.yaml:12"
    )
    expect(dialog.get_by_label("Log of attempt 20260101-a")).to_contain_text("last line")


def test_the_banner_of_a_failed_stream_shows_the_line_of_the_spec(
    show: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that the error names is marked; passwords of the file are not shown."""
    lines = ["apiVersion: tidegate/v1", "name: meters", *(f"# {n}" for n in range(3, 12))]
    text = "\n".join([*lines, "  rules: {no: 1}", "  password: hunter2"])
    (tmp_path / "water.yaml").write_text(text)
    monkeypatch.setenv("TIDEGATE_PIPELINES", str(tmp_path))
    page = show("#/meters")
    page.get_by_role("button", name="Line of the spec").click()
    dialog = page.get_by_role("dialog", name="Spec of meters")
    expect(dialog).to_contain_text("water.yaml, line 12")
    expect(dialog.locator("mark")).to_contain_text("12    rules: {no: 1}")
    expect(dialog.get_by_label("Lines of the spec")).not_to_contain_text("hunter2")


def test_the_banner_of_a_failed_stream_finds_a_line_by_its_name(
    show: Open, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other name that ends in the same letters, and no comment, is taken for it."""
    lines = ["name: meters", "# no: a rule", "piano: 1", "rules: {other: 1, no: 1}"]
    (tmp_path / "water.yaml").write_text("\n".join(lines))
    monkeypatch.setenv("TIDEGATE_PIPELINES", str(tmp_path))
    error = {"message": "row 3 of a.parquet breaks rule no of source north"}
    History(site.store, "meters", ("north", "south")).says("failed", error=error)
    page = show("#/meters")
    page.get_by_role("button", name="Line of the spec").click()
    expect(page.get_by_role("dialog", name="Spec of meters")).to_contain_text("water.yaml, line 4")


def test_a_host_without_the_spec_says_so(
    show: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server need not have the folder of the DAGs."""
    monkeypatch.setenv("TIDEGATE_PIPELINES", str(tmp_path))
    page = show("#/meters", quiet=False)
    page.get_by_role("button", name="Line of the spec").click()
    alert = page.get_by_role("dialog").get_by_role("alert")
    expect(alert).to_contain_text("has no file with the spec of meters")


def test_broken_specs_are_listed_above_the_streams(show: Open, site: Site) -> None:
    """File, line and field of each mistake, also of a file that is not YAML."""
    site.desk.broken = [
        "- /specs/shop.yaml:30: windows.w.latness: unknown field, did you mean 'lateness'?",
        "/specs/shop.yaml:31: not valid YAML: a tab",
    ]
    try:
        rows = show().get_by_role("table", name="Broken specs").locator("tbody tr")
        expect(rows).to_have_count(2)
        assert rows.nth(0).locator("td").all_inner_texts() == [
            "shop.yaml",
            "30",
            "windows.w.latness",
            "unknown field, did you mean 'lateness'?",
        ]
        expect(rows.nth(1)).to_contain_text("not valid YAML: a tab")
    finally:
        site.desk.broken = []


def test_results_are_shown_and_a_late_row_is_explained(chromium: Browser, tmp_path: Path) -> None:
    """Tables with rows and address, late rows by output with their download, a row's way."""
    shop = Shop(LocalStore(tmp_path / "store"), parse_spec(SHOP_SPEC), tmp_path)
    write_spec(shop.store, shop.spec)
    for number, rows in enumerate(OBJECTS):
        shop.put(number, rows)
    shop.run()
    with served(app_of(FakeAirflowQueries(["shop"], shop.store))) as url:
        page = chromium.new_page()
        page.goto(f"{url}/page#/shop/results")
        panel = page.locator("#results")
        expect(panel.get_by_role("img", name="Newest window results")).to_be_visible()
        panel.get_by_label("Table", exact=True).select_option("late")
        panel.get_by_label("Output").select_option("hourly")
        sample = panel.get_by_role("table", name="Newest rows of late")
        expect(sample.locator("tbody tr")).to_have_count(2)
        with page.expect_download() as saved:
            panel.get_by_role("link", name="Download 2 rows").click()
        assert saved.value.path().read_text().count("late_window") == 2
        panel.get_by_label("Column").select_option("price")
        panel.get_by_label("Value").fill("2")
        panel.get_by_role("button", name="Find").click()
        expect(panel.locator(".found")).to_contain_text("which web/0 held")
        page.close()


def test_a_job_is_not_asked_for_tables(chromium: Browser, tmp_path: Path) -> None:
    """It has none of its own, so the questions about results would fail."""
    bench = JobBench(tmp_path)
    query, made = bench.query("counts")
    for batch in range(2):
        made.commit(batch)
        bench.sealer.seal(query, batch, BatchReport())
    page = chromium.new_context().new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with served(app_of(FakeAirflowQueries(["clicks"], bench.store))) as url:
        page.goto(f"{url}/page#/clicks")
        expect(page.locator("#queries")).to_contain_text("counts")
        expect(page.locator("#proof")).to_contain_text("First epoch")
        page.wait_for_timeout(1000)
        assert not [one for one in asked if "/results/" in one]
        page.context.close()


def test_the_timeline_is_narrowed_and_saved(show: Open, site: Site) -> None:
    """Restores, drivers, runs and verdicts in one table; the file has what was shown, no script."""
    at = int(time.time() * 1000) - 60_000
    run = {"kind": "stop", "dag_id": "flights.stop", "run_id": "r7", "state": "success"}
    facts = {"who": "uwe", "at": at, "ended": at + 4_000, "conf": {"reason": "release 7"}}
    site.desk.past = [{**run, **facts, "tasks": [], "question": None}]
    try:
        page = show("#/flights/trail")
        panel = page.locator("#trail")
        rows = panel.get_by_role("table", name="Timeline").locator("tbody tr")
        expect(panel).to_contain_text("stop: done after 4 s")
        expect(panel).to_contain_text("the driver with token 1 began")
        panel.get_by_label("Kind of event").select_option("Restores")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("restored to")
        panel.get_by_label("Kind of event").select_option("everything")
        panel.get_by_label("Only events with this word").fill("RELEASE 7")
        expect(rows).to_have_count(1)
        with page.expect_download() as saved:
            panel.get_by_role("button", name="Save as HTML").click()
        text = saved.value.path().read_text()
        assert saved.value.suggested_filename == "flights-timeline.html"
        assert (text.count("release 7"), "<script" in text) == (1, False)
        assert f"{site.url.partition('/tidegate')[0]}/dags/flights.stop/runs/r7" in text
    finally:
        site.desk.past = []


@pytest.mark.parametrize("refusal", [None, "you have asked for it", "only olga may answer"])
def test_only_who_may_approve_can_press_approve(
    show: Open, site: Site, refusal: str | None
) -> None:
    """A user who may not sees the reason; the user who asked may still withdraw the request."""
    since = int(time.time() * 1000) - 9_000
    question = {
        "task": "approve",
        "subject": "Restore flights?",
        "body": "",
        "options": ["Approve", "Reject"],
        "assigned": [],
        "since": since,
        "refusal": refusal,
    }
    run = {"kind": "recover", "dag_id": "flights.recover", "run_id": "r", "state": "running"}
    facts = {"who": "ann", "at": since, "ended": None, "conf": {}, "tasks": []}
    site.desk.shown, site.desk.approval = [{**run, **facts, "question": question}], True
    try:
        page = show("#/flights")
        asked = page.locator(".question")
        approve, reject = (asked.get_by_role("button", name=n) for n in ("Approve", "Reject"))
        expect(reject).to_be_enabled(enabled=refusal is None or "you" in refusal)
        expect(approve).to_be_enabled(enabled=refusal is None)
        if refusal is not None:
            expect(asked).to_contain_text(f"You cannot approve this: {refusal}.")
        page.locator("#checkpoints tbody tr").nth(2).get_by_role("button", name="Restore").click()
        dialog = page.get_by_role("dialog", name="Restore flights")
        expect(dialog).to_contain_text("Another person has to approve it")
        expect(dialog.get_by_role("button", name="Ask for it")).to_be_visible()
    finally:
        site.desk.shown, site.desk.approval = [], False


def test_sources_can_be_told_apart_in_every_chart(show: Open) -> None:
    """A source keeps its colour in table and charts, and the lines of 24 sources all differ."""
    page = show("#/flights")
    page.wait_for_selector("#lateness .legend li")
    colours = """root => Object.fromEntries([...document.querySelectorAll(root)].flatMap(
      row => { const key = row.querySelector("i"), name = row.innerText.match(/EWR|JFK|LGA/);
               return key && name ? [[name[0], getComputedStyle(key).backgroundColor]] : []; }))"""
    in_table = page.evaluate(colours, "#sources table tbody tr")
    assert len(set(in_table.values())) == 3
    assert page.evaluate(colours, "#lateness .legend li") == in_table
    looks = """async () => {
      const {look} = await import(new URL("assets/chart.js", document.baseURI).href);
      return [...Array(24).keys()].map(i => JSON.stringify(look(i)));
    }"""
    assert len(set(page.evaluate(looks))) == 24


def test_panels_share_the_width_of_a_laptop(show: Open) -> None:
    """No chart leaves half of the page empty beside it."""
    page = show("#/flights")
    left, right = (page.locator(f"#{name}").bounding_box() for name in ("sources", "throughput"))
    assert left is not None
    assert right is not None
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]


def test_the_page_explains_its_words(show: Open) -> None:
    """The frontier is named a watermark, as in Spark and Flink."""
    words = show("#/flights").locator("#words")
    words.get_by_text("What the words mean").click()
    expect(words).to_contain_text("The watermark: no further row")
    shown = set(words.locator("dt").all_inner_texts())
    assert {"Epoch", "Lag", "Late", "Dead letters", "Barrier", "Timeline"} <= shown


def test_a_link_to_a_section_holds_while_the_panels_above_it_fill(show: Open) -> None:
    """Panels that are filled later do not push the section out of sight; a reader who acts may."""
    page = show("#/flights/trail")
    heading = page.locator("#trail-title")
    expect(heading).to_be_in_viewport()
    grow = "height => { document.querySelector('#graph').style.minHeight = height; }"
    page.evaluate(grow, "4000px")
    expect(heading).to_be_in_viewport()
    page.keyboard.press("Home")
    expect(heading).not_to_be_in_viewport()
    page.evaluate(grow, "5000px")
    page.evaluate(
        "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )
    expect(heading).not_to_be_in_viewport()


def test_the_end_of_a_refused_restore_is_told(show: Open, site: Site) -> None:
    """A request that someone refused does not vanish; the page says who, why, and what follows."""
    step = {"who": "uwe", "target": "t0-000001-aa", "head": "t0-000002-bb"}
    record_restore_event(site.store, "taxis", "asked-1", RestoreEvent.ASKED, **step)
    why = "uwe has asked for it and may not approve it as well"
    record_restore_event(
        site.store, "taxis", "asked-1", RestoreEvent.REFUSED, who="tidegate", detail=why
    )
    run = {"kind": "recover", "dag_id": "taxis.recover", "run_id": "asked-1", "state": "failed"}
    site.desk.shown = [{**run, "who": "uwe", "at": 0, "ended": 1, "conf": {}, "tasks": []}]
    try:
        note = show("#/taxis").locator("#answer")
        expect(note).to_contain_text("The restore that uwe asked for was refused by tidegate")
        expect(note).to_contain_text("may not approve it as well. Nothing was changed.")
    finally:
        site.desk.shown = []


def test_nothing_yet_is_explained(show: Open, site: Site) -> None:
    """No pipelines, a pipeline that never ran, a pipeline that does not exist.

    Each says what to do.
    """
    page = show("#/tides")
    expect(page.locator("#checkpoints")).to_contain_text("Nothing was sealed yet. Start…")
    expect(page.get_by_role("button", name="Start…")).to_be_visible()
    expect(page.locator("#barriers, #requests").filter(visible=True)).to_have_count(0)
    page.close()
    lost = show("#/nowhere", quiet=False)
    expect(lost.locator("main")).to_contain_text("There is no such stream.")
    known, site.desk.pipelines = site.desk.pipelines, []
    try:
        expect(show().locator("main")).to_contain_text("dags/pipelines")
    finally:
        site.desk.pipelines = known


def test_values_from_outside_are_text(show: Open, site: Site) -> None:
    """A reason that looks like markup is shown as it was written."""
    site.desk.pipelines.append("nasty")
    history = History(site.store, "nasty", ("<img src=x onerror=alert(1)>",))
    history.restore(history.extend(3)[0], who="<b>ann</b>", why="<script>alert(1)</script>")
    keep_spec(History(site.store, "nasty", ("one",)))
    page = show("#/nasty")
    expect(page.locator("#trail")).to_contain_text("<script>alert(1)</script>")
    assert page.evaluate("document.querySelectorAll('main img, main script, main b b').length") == 0
    # A page that is open asks again, and would be answered that the stream does not exist.
    page.close()
    site.desk.pipelines.remove("nasty")


def _tab_to(page: Page, wanted: str | Callable[[dict[str, str]], bool]) -> str:
    for _ in range(150):
        page.keyboard.press("Tab")
        at = page.evaluate("({id: document.activeElement.id, tag: document.activeElement.tagName})")
        if at["id"] == wanted if isinstance(wanted, str) else wanted(at):
            return str(at["id"])
    raise AssertionError(f"Tab never reached {wanted}")
