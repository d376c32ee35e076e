"""The checkpoint table of the Streams page in a real Chromium."""

from __future__ import annotations

import time

import pytest
from playwright.sync_api import expect

from tests.e2e.browser import PATIENCE
from tests.e2e.page.streams_page import PAGE_MARKS, Open, Site
from tests.yardstick import slowness

pytestmark = PAGE_MARKS


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
    expect(dialog).to_contain_text("Rows, this one less the other")
    dialog.locator("#other").select_option("before_fix")
    expect(dialog).to_contain_text("output.inputs.EWR.frontier")


@pytest.mark.parametrize("width", [390, 1280])
def test_both_choices_above_the_table_can_be_clicked(show: Open, width: int) -> None:
    """Which checkpoints, and sealed until when: neither covers the other."""
    page = show("#/flights/checkpoints", width=width)
    page.locator("#checkpoints tbody tr").first.wait_for()
    for choice in ("#which", "#until"):
        page.locator(choice).click(trial=True)
        box = page.locator(choice).evaluate(
            """node => { const b = node.getBoundingClientRect();
            return [[b.left + 3, b.top + 3], [b.right - 3, b.bottom - 3]].every(
              ([x, y]) => document.elementFromPoint(x, y) === node) }"""
        )
        assert box, choice
