"""Take the pictures of the docs in headless Chromium.

`make site` takes those of the Streams page for the site. Usage, in the project's folder:
    python -m docs.screenshots                  the Streams page, from streams made up for the
                                                tests; needs no server
    python -m docs.screenshots STACK_FOLDER     the same page within Airflow, from a running stack,
                                                for example .tidegate/demo
"""

import json
import shutil
import sys
import urllib.request
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

from tidegate.infra.local_stack import Stack, StackSettings

IMAGES = Path(__file__).parent / "images"
BROWSER_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
]


def take_made_up_streams(images: Path) -> None:
    """Take the pictures of the Streams page: list, stream by day and night, restore form, phone."""
    with sync_playwright() as tools, open_chromium(tools) as browser:
        shoot_made_up_streams(browser, images)


def open_chromium(tools: Playwright) -> Browser:
    """Start the Chromium of this machine."""
    path = shutil.which("chromium")
    return tools.chromium.launch(executable_path=path, args=BROWSER_FLAGS)


def shoot_made_up_streams(browser: Browser, images: Path) -> None:
    """The list, one stream by day and by night, the restore form, a phone."""
    from tests.operators.history import GALLERY, gallery
    from tests.operators.pages import FakeAirflowQueries, app_of, served
    from tests.servers.memory_store import MemoryStore

    store = MemoryStore()
    gallery(store)
    with served(app_of(FakeAirflowQueries(GALLERY, store, paused=["orders"]))) as url:
        save_screenshot(browser, images, "streams", f"{url}/page", "tr[data-pipeline]", height=560)
        save_screenshot(
            browser,
            images,
            "streams-page",
            f"{url}/page#/flights",
            "#checkpoints tbody tr",
            height=1230,
        )
        save_screenshot(
            browser,
            images,
            "streams-page-dark",
            f"{url}/page#/flights",
            "#checkpoints tbody tr",
            scheme="dark",
        )
        save_screenshot(
            browser,
            images,
            "streams-checkpoints",
            f"{url}/page#/flights/checkpoints",
            "#checkpoints tbody tr",
            height=620,
        )
        save_screenshot(
            browser,
            images,
            "streams-restore",
            f"{url}/page#/flights",
            "#checkpoints tbody tr",
            height=620,
            do=fill_restore_form,
        )
        save_screenshot(
            browser,
            images,
            "streams-phone",
            f"{url}/page#/flights",
            "#checkpoints tbody tr",
            width=390,
            height=1100,
        )


def fill_restore_form(page: Page) -> None:
    """Open it and give a reason."""
    page.locator("[id^=restore-]").nth(12).click()
    page.get_by_label("Reason").fill("flights of the 3rd came with wrong times")
    page.wait_for_selector(".report dl")


def shoot_within_airflow(browser: Browser, home: Path) -> None:
    """The page in Airflow's frame, as admin."""
    stack = Stack(StackSettings(home=home))
    login = json.loads(stack.credentials_file.read_text())["airflow_passwords"]["admin"]
    body = json.dumps({"username": "admin", "password": login}).encode()
    request = urllib.request.Request(  # noqa: S310
        f"{stack.airflow_url}/auth/token", body, {"Content-Type": "application/json"}
    )
    token = json.loads(urllib.request.urlopen(request).read())["access_token"]  # noqa: S310
    cookie = {"name": "_token", "value": token, "url": stack.airflow_url}
    save_screenshot(
        browser,
        IMAGES,
        "streams-in-airflow",
        f"{stack.airflow_url}/plugin/streams",
        "iframe",
        cookie=cookie,
    )


def save_screenshot(
    browser: Browser,
    images: Path,
    name: str,
    url: str,
    ready: str,
    *,
    width: int = 1280,
    height: int = 900,
    scheme: Literal["light", "dark"] = "light",
    cookie: Any = None,
    do: Callable[[Page], None] = lambda page: None,
) -> None:
    """Save one PNG."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    if cookie:
        context.add_cookies([cookie])
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector(ready)
    do(page)
    page.wait_for_timeout(2000)
    found = Image.open(BytesIO(page.screenshot())).convert("RGB")
    found.quantize(256, dither=Image.Dither.NONE).save(
        images / f"{name}.png", optimize=True
    )  # a third of the size
    context.close()


def main(stack: Path | None) -> None:
    """Take them."""
    if stack is None:
        take_made_up_streams(IMAGES)
        return
    with sync_playwright() as tools, open_chromium(tools) as browser:
        shoot_within_airflow(browser, stack)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
