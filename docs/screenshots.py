"""Take the pictures of the docs from a running stack (`make up`, or the demo while it runs) in headless Chromium.

Usage: python docs/screenshots.py STACK_FOLDER, for example .tidegate/demo
"""

import json
import sys
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

from tidegate.infra.stack import Stack, StackSettings

IMAGES = Path(__file__).parent / "images"
PAGES = {"streams-page": "/tidegate/page?dag=flights.stream", "airflow-stream": "/dags/flights.stream"}
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]


def main(home: Path) -> None:
    """Log in as admin and save one PNG per page."""
    stack = Stack(StackSettings(home=home))
    login = json.loads(stack.credentials_file.read_text())["airflow_passwords"]["admin"]
    body = json.dumps({"username": "admin", "password": login}).encode()
    request = urllib.request.Request(f"{stack.airflow_url}/auth/token", body, {"Content-Type": "application/json"})  # noqa: S310
    token = json.loads(urllib.request.urlopen(request).read())["access_token"]  # noqa: S310
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.add_cookies([{"name": "_token", "value": token, "url": stack.airflow_url}])
        for name, path in PAGES.items():
            page = context.new_page()
            page.goto(stack.airflow_url + path)
            page.wait_for_timeout(4000)
            page.screenshot(path=str(IMAGES / f"{name}.png"))
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
