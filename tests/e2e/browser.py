"""A real headless Chromium for the tests that look at pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM: Final = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
FLAGS: Final = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE: Final = 60_000  # milliseconds; a busy machine

expect.set_options(timeout=PATIENCE)


def may_skip(chromium: str | None) -> bool:
    """Whether a test may be skipped for want of a browser.

    CI installs one. Where that failed the tests fail: a skip would hide that no test looks at the
    page.
    """
    return chromium is None and os.environ.get("CI") != "true"


needs_chromium = pytest.mark.skipif(
    may_skip(CHROMIUM), reason="no chromium: apt-get install chromium"
)


@contextmanager
def browser_of_the_machine() -> Iterator[Browser]:
    """Started again, closed in the end."""
    assert CHROMIUM is not None, "no chromium: apt-get install chromium"
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def wide(page: Page) -> list[str]:
    """What sticks out to the right of the window; nothing should."""
    found: list[str] = page.evaluate(
        """() => document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll("main *")]
             .filter(n => n.getBoundingClientRect().right > innerWidth + 1).map(n => n.outerHTML.slice(0, 120))"""
    )
    return found


def strange_requests(page: Page, home: str, *, busy: bool = False) -> list[str]:
    """Collects addresses outside `home`, errors on the console and scripts that failed, from now
    on.

    With `busy` the server may say now and then that it cannot just now: the page asks again.
    """
    found: list[str] = []

    def told(said: Any) -> None:
        if said.type == "error" and not (busy and "responded with a status of 50" in said.text):
            found.append(said.text)

    def asked(request: Any) -> None:
        if not request.url.startswith((home, "data:", "blob:")):
            found.append(request.url)

    page.on("request", asked)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", told)
    return found
