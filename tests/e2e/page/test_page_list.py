"""The list of the Streams page in a real Chromium: its order, its filter, broken specs, an empty Airflow."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.e2e.page.streams_page import PAGE_MARKS, Open, Site

pytestmark = PAGE_MARKS


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
