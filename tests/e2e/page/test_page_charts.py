"""The charts of the Streams page in a real Chromium: zones, colours, long names."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.e2e.browser import wide
from tests.e2e.page.streams_page import PAGE_MARKS, Open, Site
from tests.operators.history import History, keep_spec

pytestmark = PAGE_MARKS

LONG = "warehouse_temperature_sensors_of_the_northern_halls"

# Texts of the two drawings that do not stay where they belong.
_STRAY = """() => [
  ...[...document.querySelectorAll("#graph .node text")].filter(text =>
    text.getBoundingClientRect().right > text.parentNode.querySelector("rect").getBoundingClientRect().right),
  ...[...document.querySelectorAll("#barriers .plot text")].filter(text =>
    text.getBoundingClientRect().left < text.closest("section").getBoundingClientRect().left),
].map(text => text.textContent)"""


@pytest.fixture
def long_names(site: Site) -> Iterator[str]:
    """The address of a stream whose names need room."""
    history = History(site.store, LONG, [f"hall_{n}_sensors_of_row_{n}" for n in range(12)])
    history.extend(15)
    keep_spec(history)
    site.desk.pipelines.append(LONG)
    yield f"#/{LONG}"
    site.desk.pipelines.remove(LONG)


@pytest.mark.parametrize("width", [390, 1280])
def test_long_names_stay_in_their_places(show: Open, long_names: str, width: int) -> None:
    """In the boxes of the graph, beside the lanes of barriers, and in the list."""
    page = show(long_names, width=width)
    page.locator("#barriers .plot text").first.wait_for()
    assert page.evaluate(_STRAY) == []
    assert wide(page) == []
    listed = show(width=width)
    listed.locator("tr[data-pipeline]").first.wait_for()
    assert wide(listed) == []
    for one in (page, listed):
        one.close()  # it asks again, and its stream is taken away


def test_times_name_their_zone(show: Open) -> None:
    """Below each axis of times, and where a point is read."""
    page = show("#/flights")
    page.locator("#checkpoints tbody tr").first.wait_for()
    plots = page.locator("#sources svg[tabindex], #throughput svg[tabindex]")
    expect(plots).to_have_count(4)
    for plot in plots.all():
        expect(plot.locator("text", has_text=re.compile("^UTC$"))).to_have_count(1)
    plots.first.focus()
    page.keyboard.press("Home")
    expect(page.locator("#sources .readout").first).to_contain_text(
        re.compile(r"epoch \d+, \d\d:\d\d:\d\d UTC")
    )


def test_a_colour_of_a_source_means_this_source(show: Open) -> None:
    """It is the same in every chart, and no other line has it."""
    page = show("#/flights")
    page.locator("#checkpoints tbody tr").first.wait_for()
    page.locator("#lateness .legend i").first.wait_for()
    strokes = """nodes => nodes.map(node => node.getAttribute("stroke"))"""
    sources = page.locator("#sources svg path.line").evaluate_all(strokes)
    others = page.locator("#throughput svg path.line").evaluate_all(strokes)
    assert [sources[:3], sources[3]] == [sources[4:7], "var(--ink)"]
    assert set(others).isdisjoint(sources[:3])
    curves = page.locator("#lateness svg path.curve").evaluate_all(strokes)
    assert curves == sources[:3]
