"""The gallery of streams, served for tests that look at the Streams page in a real Chromium.

The fixtures are in `conftest.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest
from playwright.sync_api import Page, Route

from tests.e2e.browser import needs_chromium
from tests.operators.history import History
from tests.operators.pages import FakeAirflowQueries
from tests.servers.memory_store import Fault, MemoryStore

PAGE_MARKS: Final = [
    pytest.mark.e2e,
    pytest.mark.slow,
    needs_chromium,
    pytest.mark.timeout(1800),
]

Open = Callable[..., Page]

# Contrast of what is written against what lies behind it, as WCAG computes it, over every element
# with text of its own.
CONTRAST: Final = """() => {
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
NAMELESS: Final = """() => [...document.querySelectorAll("button, select, input, a, table, svg[role=img], section")]
  .filter(n => n.closest("main") && !(n.getAttribute("aria-label") || n.getAttribute("aria-labelledby")
    || n.textContent.trim() || n.labels?.[0]?.textContent.trim())).map(n => n.outerHTML.slice(0, 100))"""
TWICE: Final = """() => [...document.querySelectorAll("[id]")].map(n => n.id).filter((id, i, ids) => ids.indexOf(id) !== i)"""


@dataclass
class Site:
    """The gallery, served."""

    url: str
    alive: History
    desk: FakeAirflowQueries
    store: MemoryStore
    fault: Fault | None = None


def answer_starts(page: Page) -> list[dict[str, Any]]:
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


def tab_to(page: Page, wanted: str | Callable[[dict[str, str]], bool]) -> str:
    """Press Tab until the wanted element has the focus; its id."""
    for _ in range(150):
        page.keyboard.press("Tab")
        at = page.evaluate("({id: document.activeElement.id, tag: document.activeElement.tagName})")
        if at["id"] == wanted if isinstance(wanted, str) else wanted(at):
            return str(at["id"])
    raise AssertionError(f"Tab never reached {wanted}")
