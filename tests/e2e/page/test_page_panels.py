"""Results, timeline and the page of a job in a real Chromium."""

from __future__ import annotations

import re
import time
from pathlib import Path

from playwright.sync_api import Browser, Route, expect

from tests.cli.shop import OBJECTS, Shop
from tests.cli.shop import SPEC as SHOP_SPEC
from tests.e2e.page.streams_page import PAGE_MARKS, Open, Site
from tests.operators.pages import FakeAirflowQueries, app_of, served
from tests.sealed_queries.conftest import JobBench
from tidegate.checkpoints.batch_notes import BatchReport
from tidegate.checkpoints.checkpoint_specs import write_spec
from tidegate.checkpoints.driver_requests import DesiredState, set_desired_state
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.spec.loader import parse_spec

pytestmark = PAGE_MARKS


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


def test_a_chart_says_how_many_keys_it_leaves_out(chromium: Browser, tmp_path: Path) -> None:
    """Otherwise the key that someone looks for seems to have no results."""
    shop = Shop(LocalStore(tmp_path / "store"), parse_spec(SHOP_SPEC), tmp_path)
    write_spec(shop.store, shop.spec)
    for number, rows in enumerate(OBJECTS):
        shop.put(number, rows)
    shop.run()

    def leave_out_two(route: Route) -> None:
        answer = route.fetch()
        found = answer.json()
        if found.get("chart"):
            found["chart"]["left_out"] = 2
        route.fulfill(response=answer, json=found)

    with served(app_of(FakeAirflowQueries(["shop"], shop.store))) as url:
        page = chromium.new_page()
        page.route("**/results/*", leave_out_two)
        page.goto(f"{url}/page#/shop/results")
        keys = re.compile(r"^(\d+) of (\d+) keys are drawn, those with the most results")
        expect(page.locator("#left-out")).to_have_text(keys)
        page.locator("#left-out").click()
        page.get_by_label("Only keys with this text").fill("CU")
        page.get_by_role("checkbox", name="cup").uncheck()
        expect(page.locator("#left-out")).to_have_text("1 of 4 keys are drawn")
        expect(page.locator("#results .readout")).not_to_contain_text("cup")
        page.close()


def test_edges_have_rates_and_checkpoints_their_spec(show: Open) -> None:
    """How fast rows come from each source, and what each checkpoint was sealed with."""
    page = show("#/flights")
    expect(page.locator("#graph svg")).to_contain_text(re.compile(r"[\d.,]+ rows/s"))
    row = page.locator("#checkpoints tbody tr").first
    expect(row.locator("[data-head='Dead letters']")).to_have_text("0")
    expect(row.locator("[data-head=Spec]")).to_have_text("s")
    # The newest checkpoints may be younger than the verdict.
    judged = page.locator("#checkpoints tbody tr").last
    expect(judged.locator("[data-head=Quality]")).to_contain_text("ago")


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
        links = page.get_by_role("navigation", name="On this page").get_by_role("link")
        assert links.all_inner_texts() == [
            *("Frontier", "Throughput", "Quality", "Checkpoints", "Timeline")
        ]
        expect(page.locator(".facts")).not_to_contain_text("Late")
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


def test_a_stream_without_an_epoch_has_no_empty_panels(show: Open) -> None:
    """What has nothing to show takes no room, and no link leads there."""
    page = show("#/tides")
    expect(page.locator("#checkpoints")).to_contain_text("Nothing was sealed yet")
    links = page.get_by_role("navigation", name="On this page").get_by_role("link")
    expect(links).to_have_text(["Quality", "Checkpoints", "Timeline"])
    panels = page.locator("#graph, #sources, #throughput, #results, #lateness, #whatif")
    expect(panels.filter(visible=True)).to_have_count(0)
    page = show("#/flights")
    page.locator("#checkpoints tbody tr").first.wait_for()
    links = page.get_by_role("navigation", name="On this page").get_by_role("link")
    expect(links).to_have_count(10)


def test_results_that_are_being_read_offer_nothing_to_choose(show: Open) -> None:
    """The tables may take a while: until then there is no empty choice, and a word about it."""
    page = show(quiet=False)
    held: list[Route] = []
    page.route("**/results/tables*", lambda route: held.append(route))
    page.locator("#open-flights").click()
    panel = page.locator("#results")
    expect(panel).to_contain_text("Reading the tables…")
    expect(panel.locator("select, input, button").filter(visible=True)).to_have_count(0)
    for route in held:
        route.continue_()
    expect(panel.get_by_role("button", name="Find")).to_be_visible()


def test_it_is_not_over_while_a_restore_is_under_way(show: Open, site: Site) -> None:
    """The first epoch that the panel names is then one from before the restore."""
    first = show("#/flights").locator("#proof [data-proof=first]")
    expect(first).to_have_class("good")
    try:
        set_desired_state(site.store, "flights", DesiredState.RECOVERING, who="ann")
        first = show("#/flights").locator("#proof [data-proof=first]")
        expect(first).to_contain_text("The stream is recovering")
        expect(first).to_have_class("warn")
    finally:
        set_desired_state(site.store, "flights", DesiredState.RUN, who="ann")
