"""Judges the states of the Streams page with axe-core, in a real Chromium.

    python -m tests.e2e.a11y                       prints each finding; ends with "N serious in N
                                                   states"
    python -m tests.e2e.a11y --pictures FOLDER     also saves a picture of each state there
    python -m tests.e2e.a11y --only restore pin --looks dark phone    judges only these

axe-core comes from the package registry, once, into the cache folder. `serious` counts findings
that axe calls serious or critical; the others are printed too.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import BrowserContext, Page

from tests.e2e.browser import browser_of_the_machine, wide
from tests.e2e.page.scene import Scene, served_scene
from tests.e2e.page.states import STATES, State

_AXE = "axe-core@4.14.1"
_SERIOUS = ("serious", "critical")
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}


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


def open_state(context: BrowserContext, scene: Scene, state: State) -> Page:
    """A new page in this state."""
    page = context.new_page()
    state.prepare(scene)
    state.before(page)
    page.goto(f"{getattr(scene, state.site)}/page{state.fragment}")
    state.act(page)
    return page


def save_picture(page: Page, file: Path) -> None:
    """The whole page; of a dialog only the window, because the page behind it does not matter."""
    if not page.locator(".loading").count():
        page.wait_for_load_state("networkidle")
    page.screenshot(path=file, full_page=not page.locator("dialog[open]").count())


def judge_look(
    look: str, context: BrowserContext, scene: Scene, states: list[State], pictures: Path | None
) -> int:
    """Judge these states in one look; the number of serious findings."""
    axe, serious = fetch_axe(), 0
    for state in states:
        page = open_state(context, scene, state)
        if pictures:
            save_picture(page, pictures / f"{look} {state.name}.png")
        found = judge(page, axe)
        if stick_out := wide(page):
            nodes = [{"html": html} for html in stick_out]
            found.append({"impact": "serious", "id": "sticks-out", "nodes": nodes})
        for finding in found:
            serious += finding["impact"] in _SERIOUS
            where = finding["nodes"][0]["html"][:120]
            count = len(finding["nodes"])
            said = f"{finding['impact']} {finding['id']} x {count}: {where}"
            sys.stdout.write(f"{state.name}, {look}: {said}\n")
            sys.stdout.flush()
        page.close()
    return serious


def main() -> int:
    """Judge the states in every look."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--looks", nargs="+", choices=list(LOOKS), default=list(LOOKS))
    parser.add_argument("--only", nargs="+", choices=[state.name for state in STATES])
    options = parser.parse_args()
    states = [state for state in STATES if not options.only or state.name in options.only]
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    serious = 0
    logging.getLogger("pyiceberg").setLevel(logging.WARNING)
    with (
        tempfile.TemporaryDirectory() as folder,
        served_scene(Path(folder)) as scene,
        browser_of_the_machine() as browser,
    ):
        for look in options.looks:
            # The page's policy allows only its own scripts, and axe is not one of them.
            context = browser.new_context(bypass_csp=True, reduced_motion="reduce", **LOOKS[look])
            serious += judge_look(look, context, scene, states, options.pictures)
            context.close()
    sys.stdout.write(f"{serious} serious in {len(options.looks) * len(states)} states\n")
    return min(serious, 1)


if __name__ == "__main__":
    sys.exit(main())
