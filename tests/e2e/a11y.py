"""Judges the states of the Streams page with axe-core, in a real Chromium.

    python -m tests.e2e.a11y       prints each finding; ends with "N serious in N states"

axe-core comes from the package registry, once, into the cache folder. `serious` counts findings
that axe calls serious or critical; the others are printed too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from tests.e2e.browser import browser_of_the_machine
from tests.operators.history import GALLERY, gallery
from tests.operators.pages import FakeAirflowQueries, app_of, served
from tests.servers.memory_store import MemoryStore

_AXE = "axe-core@4.14.1"
_SERIOUS = ("serious", "critical")
_QUESTION = {
    "kind": "recover",
    "dag_id": "flights.recover",
    "run_id": "r",
    "state": "running",
    "who": "ann",
    "at": 1,
    "ended": None,
    "conf": {},
    "tasks": [],
    "question": {
        "task": "approve",
        "subject": "Restore flights?",
        "body": "the impact",
        "options": ["Approve", "Reject"],
        "assigned": [],
        "since": 1,
        "refusal": "you have asked for it",
    },
}


def _press(button: str) -> Callable[[Page], None]:
    def press(page: Page) -> None:
        page.locator(button).first.click()
        page.get_by_role("dialog").wait_for()

    return press


def _look_for_a_row(page: Page) -> None:
    page.get_by_label("Value").fill("7")
    page.get_by_role("button", name="Find").click()
    page.locator("#results .note").wait_for()


def _open_everything(page: Page) -> None:
    for summary in page.locator("summary").all():
        summary.click()


def _open_what_if(page: Page) -> None:
    page.locator("#whatif-open summary").click()
    page.locator("#whatif .note, #whatif table").first.wait_for()


# Name, address, and what is done there.
STATES: list[tuple[str, str, Callable[[Page], None]]] = [
    ("list", "", lambda page: page.locator("tr[data-pipeline]").first.wait_for()),
    ("running", "#/flights", lambda page: page.locator("#trail tbody tr").first.wait_for()),
    ("tables and words", "#/flights", _open_everything),
    ("a row that is not there", "#/flights", _look_for_a_row),
    ("restore", "#/flights", _press("[id^=restore-]")),
    ("pin", "#/flights", _press("[id^=pin-]")),
    ("diff", "#/flights", _press("[id^=diff-]")),
    ("stop", "#/flights", _press("#stop")),
    ("start", "#/clicks", _press("#start")),
    ("failed", "#/meters", lambda page: page.locator("#why-failed").wait_for()),
    ("why failed", "#/meters", _press("#why-failed")),
    ("line of the spec", "#/meters", _press("#spec-line")),
    ("waits", "#/taxis", lambda page: None),
    ("down", "#/orders", lambda page: None),
    ("never ran", "#/tides", lambda page: None),
    ("failed checks", "#/orders", lambda page: page.locator("#quality .found").wait_for()),
    ("what if", "#/flights", _open_what_if),
    ("no such stream", "#/nowhere", lambda page: None),
]
LOOKS: list[dict[str, Any]] = [
    {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
]


def fetch_axe() -> str:
    """The script of axe-core."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate" / _AXE
    script = cache / "node_modules" / "axe-core" / "axe.min.js"
    if not script.is_file():
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(cache), _AXE]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return script.read_text()


def judge(page: Page, axe: str) -> list[dict[str, Any]]:
    """What axe finds on the page as it is."""
    page.evaluate(axe)
    found: list[dict[str, Any]] = page.evaluate("axe.run().then(result => result.violations)")
    return found


def main() -> int:
    """Judge every state in every look."""
    axe, store, serious, states = fetch_axe(), MemoryStore(), 0, 0
    gallery(store, 40)
    desk = FakeAirflowQueries(GALLERY, store, paused=["orders"])
    desk.shown = [_QUESTION]
    desk.broken = ["- /specs/shop.yaml:30: windows.w.latness: unknown field"]
    with served(app_of(desk)) as url, browser_of_the_machine() as browser:
        for look in LOOKS:
            for name, fragment, act in STATES:
                # The page's policy allows only its own scripts, and axe is not one of them.
                context = browser.new_context(bypass_csp=True, reduced_motion="reduce", **look)
                page = context.new_page()
                page.goto(f"{url}/page{fragment}")
                page.locator("main > :not(.loading)").first.wait_for()
                act(page)
                states += 1
                for finding in judge(page, axe):
                    serious += finding["impact"] in _SERIOUS
                    where = finding["nodes"][0]["html"][:120]
                    width = look["viewport"]["width"]
                    sys.stdout.write(
                        f"{name}, {look['color_scheme']}, {width}: {finding['impact']}"
                        f" {finding['id']} x {len(finding['nodes'])}: {where}\n"
                    )
                context.close()
    sys.stdout.write(f"{serious} serious in {states} states\n")
    return min(serious, 1)


if __name__ == "__main__":
    sys.exit(main())
