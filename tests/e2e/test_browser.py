"""The Streams page within real Airflow, in a real Chromium.

From the list to a restore that someone else approves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import Error as PlaywrightError

from tests.e2e.browser import PATIENCE, needs_chromium, strange_requests
from tests.operators.conftest import Cockpit, cockpit_of
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.slot_log import SlotLog

pytestmark = [pytest.mark.e2e, pytest.mark.slow, needs_chromium, pytest.mark.timeout(1800)]

SPEC = """\
apiVersion: tidegate/v1
name: walk
sources:
  one: {path: inbox/one, schema: {at: timestamp, value: long}, event_time: at, lag: 1m}
supervision: {retries: 20, retry_delay: 1s, approval: true, approvers: [olga]}
"""
_LONG = 10 * PATIENCE

As = Callable[[str], Page]

_ATTACK = """async home => {
  const send = async (path, options) => {
    try {
      const found = await fetch(home + path, {credentials: "include", ...options});
      return found.type === "opaque" ? "opaque" : await found.text();
    } catch (error) { return "refused"; }
  };
  const body = JSON.stringify({logical_date: null, conf: {checkpoint: "latest"}});
  const runs = "/api/v2/dags/walk.recover/dagRuns", streams = "/tidegate/api/streams";
  return [
    await send(runs, {method: "POST", body, headers: {"Content-Type": "application/json"}}),
    await send(runs, {method: "POST", body, mode: "no-cors"}),
    await send(streams, {method: "POST", body, mode: "no-cors"}),
    await send(streams, {}),
  ];
}"""


@pytest.fixture(scope="module")
def cockpit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cockpit]:
    """A real Airflow and MinIO with one stream, driven by a fake driver."""
    with cockpit_of(tmp_path_factory.mktemp("browser"), {"walk": SPEC}) as found:
        found.known("walk.pin")
        found.runs = {"walk": found.api.trigger_dag("walk.stream")}
        found.until(lambda: found.head("walk") >= 12, 180, "some checkpoints")
        yield found


@pytest.fixture
def see_as(chromium: Browser, cockpit: Cockpit) -> Iterator[As]:
    """Opens the Streams page as a user who is logged in.

    Nothing on it may go wrong or come from elsewhere.
    """
    contexts, strange = [], []

    def open_page(user: str) -> Page:
        context = chromium.new_context(viewport={"width": 1280, "height": 900})
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        context.add_cookies(
            [{"name": "_token", "value": cockpit.bearer(user), "url": cockpit.stack.airflow_url}]
        )
        page = context.new_page()
        strange.append(strange_requests(page, cockpit.stack.airflow_url, busy=True))
        page.goto(f"{cockpit.stack.airflow_url}/tidegate/page")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [found for part in strange for found in part] == []


def test_from_the_list_to_a_restore_that_another_person_approves(
    cockpit: Cockpit, see_as: As
) -> None:
    """uwe asks with a reason after seeing the impact, olga approves on the same page, the stream
    goes on, the trail tells.
    """
    page = see_as("uwe")
    page.get_by_role("link", name="walk").click()
    expect(page.locator("h1")).to_have_text("walk")
    row = page.locator("#checkpoints tbody tr").nth(4)
    row.wait_for()
    row.hover()  # or it would move on while it is being chosen
    target = str(row.locator("code").get_attribute("title"))
    row.get_by_role("button", name="Restore").click()
    dialog = page.get_by_role("dialog", name="Restore walk")
    expect(dialog.locator(".report")).to_contain_text("everything since", timeout=PATIENCE)
    expect(dialog).to_contain_text("Another person has to approve it")
    dialog.get_by_label("Reason").fill("a bad object came in")
    dialog.get_by_role("button", name="Ask for it").click()
    expect(dialog).to_contain_text("Someone else has to approve it", timeout=_LONG)
    dialog.get_by_role("button", name="Close").click()

    other = see_as("olga")
    other.get_by_role("link", name="walk").click()
    question = other.locator(".question")
    expect(question).to_contain_text(f"Impact of restoring walk to {target}", timeout=PATIENCE)
    _approve(other)
    expect(other.locator("#trail")).to_contain_text("approved by olga")
    expect(other.locator(".facts")).to_contain_text("t1-", timeout=_LONG)
    expect(other.locator("header .pill")).to_contain_text("running", timeout=_LONG)
    fork = SlotLog(cockpit.store, "walk").list_forks()[0]
    assert (fork.recover_to, fork.who) == (target, "uwe")


def _approve(page: Page) -> None:
    """As a person does it.

    An answer that meets the task while it parks is lost, and then the question is there again.
    """
    deadline = time.monotonic() + _LONG / 1000
    button = page.locator(".question").get_by_role("button", name="Approve")
    while "restored by uwe" not in page.locator("#trail").inner_text():
        assert time.monotonic() < deadline, "the restore was not approved in time"
        with suppress(PlaywrightError):  # it was just taken away
            if button.count() and button.is_enabled(timeout=5_000):
                button.click(timeout=5_000)
        page.wait_for_timeout(1_000)


def test_a_checkpoint_is_pinned_and_unpinned(cockpit: Cockpit, see_as: As) -> None:
    """A pin is a run of a DAG, and the dialog says so.

    The row and the trail show it, and it can be given up again.
    """
    page = see_as("uwe")
    page.goto(f"{cockpit.stack.airflow_url}/tidegate/page#/walk")
    row = page.locator("#checkpoints tbody tr").nth(1)
    row.hover()
    target = str(row.locator("code").get_attribute("title"))
    row.get_by_role("button", name="Pin").click()
    dialog = page.get_by_role("dialog", name="Pin a checkpoint")
    dialog.get_by_label("Name").fill("release_7")
    dialog.get_by_role("button", name="Pin", exact=True).click()
    expect(dialog).to_contain_text("Done.", timeout=_LONG)
    dialog.get_by_role("button", name="Close").click()
    pins = RootsFile(cockpit.store, "walk").read().pins
    assert (pins["release_7"].checkpoint, pins["release_7"].who) == (target, "uwe")
    expect(page.locator("#trail")).to_contain_text("release_7", timeout=PATIENCE)
    assert str(CheckpointCatalog(SlotLog(cockpit.store, "walk")).resolve("release_7")) == target


def test_a_viewer_sees_and_may_not(cockpit: Cockpit, see_as: As) -> None:
    """No button is offered to vic, and Airflow refuses what they send all the same.

    Without a login no page is shown.
    """
    page = see_as("vic")
    page.get_by_role("link", name="walk").click()
    page.locator("#checkpoints tbody tr").first.wait_for()
    assert page.locator("[id^=restore-], [id^=pin-]").count() == 0
    assert page.locator("[id^=diff-]").count() > 0
    before = len(cockpit.api.list_runs("walk.recover"))
    for dag in ("walk.recover", "walk.pin"):
        answer = page.request.post(
            f"{cockpit.stack.airflow_url}/api/v2/dags/{dag}/dagRuns", data={"logical_date": None}
        )
        assert answer.status == 403
    assert len(cockpit.api.list_runs("walk.recover")) == before
    assert page.context.browser is not None
    stranger = page.context.browser.new_page()
    for path in (
        "page",
        "assets/app.js",
        "api/streams",
        "api/streams/walk.stream/checkpoints",
        "docs/walk.quality/index.html",
    ):
        assert stranger.request.get(f"{cockpit.stack.airflow_url}/tidegate/{path}").status == 401
    stranger.close()


def test_another_site_cannot_act_for_a_user(cockpit: Cockpit, see_as: As) -> None:
    """A foreign page in admin's own browser, cookie and all, can neither start a restore nor read
    anything.
    """
    page = see_as("admin")
    page.locator("tr[data-pipeline]").wait_for()
    before = len(cockpit.api.list_runs("walk.recover"))
    with _foreign_site() as url:
        foreign = page.context.new_page()
        foreign.goto(url)
        assert foreign.evaluate(_ATTACK, cockpit.stack.airflow_url) == [
            "refused",
            "opaque",
            "opaque",
            "refused",
        ]
    assert len(cockpit.api.list_runs("walk.recover")) == before


def test_it_lives_within_airflow_s_own_pages(cockpit: Cockpit, see_as: As) -> None:
    """The entry in the navigation and the panel beside the DAG show it in a frame, and its links
    lead out of the frame.
    """
    page = see_as("uwe")
    page.goto(f"{cockpit.stack.airflow_url}/plugin/streams")
    frame = page.frame_locator("iframe")
    frame.get_by_role("link", name="walk").click()
    expect(frame.locator("h1")).to_have_text("walk")
    frame.get_by_role("link", name="Runs in Airflow").click()
    page.wait_for_url("**/dags/walk.stream**")
    page.goto(f"{cockpit.stack.airflow_url}/dags/walk.stream/plugin/stream")
    expect(page.frame_locator("iframe").locator("h1")).to_have_text("walk", timeout=PATIENCE)
    expect(page.frame_locator("iframe").locator("#back")).to_have_count(0)
    run = cockpit.runs["walk"]
    page.goto(
        f"{cockpit.stack.airflow_url}/dags/walk.stream/runs/{run}/tasks/stream/plugin/stream-task"
    )
    expect(page.frame_locator("iframe").locator("h1")).to_have_text("walk")


@contextmanager
def _foreign_site() -> Iterator[str]:
    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<title>elsewhere</title>")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
