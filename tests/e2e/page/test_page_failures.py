"""What the Streams page says of failures, in a real Chromium: a failed stream, a lost bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.e2e.page.streams_page import PAGE_MARKS, Open, Site
from tests.operators.history import History
from tests.servers.memory_store import Fault
from tidegate.checkpoints.bucket_layout import BucketLayout

pytestmark = PAGE_MARKS


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
    # The server may answer the first look from its cache.
    expect(page.get_by_text(error["message"]).first).to_be_visible()
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
