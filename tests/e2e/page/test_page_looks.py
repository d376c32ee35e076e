"""How the Streams page looks and reads in a real Chromium: widths, colours, keyboard, names."""

from __future__ import annotations

from typing import Literal

import pytest
from playwright.sync_api import expect

from tests.e2e.browser import wide
from tests.e2e.page.streams_page import CONTRAST, NAMELESS, PAGE_MARKS, TWICE, Open, Site, tab_to
from tests.operators.history import History, keep_spec

pytestmark = PAGE_MARKS


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
            assert page.evaluate(CONTRAST) == []


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
    tab_to(page, "open-flights")
    page.keyboard.press("Enter")
    page.wait_for_selector("#checkpoints tbody tr")
    assert page.evaluate("document.activeElement.id") == "main"
    tab_to(page, lambda at: at["tag"] == "svg")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(
        "Frontier of each source"
    )
    page.keyboard.press("Home")
    expect(page.locator("#sources .readout").first).to_contain_text("epoch ")
    button = tab_to(page, lambda at: at["id"].startswith("restore-"))
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
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate(TWICE) == []


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
    # The panels above them fill one after another, and move either.
    page.wait_for_function("""() => {
      const box = name => document.getElementById(name)?.getBoundingClientRect() ?? {};
      const [left, right] = [box("sources"), box("throughput")];
      return left.width && left.top === right.top && left.right <= right.left;
    }""")
