"""The states of the Streams page, and how a browser reaches each of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from playwright.sync_api import Page

from tests.e2e.page.scene import MORE_STREAMS, Scene

Site = Literal["page", "viewer", "empty", "away", "tables", "job"]
Act = Callable[[Page], None]


@dataclass(frozen=True)
class State:
    """One state.

    Attributes:
        name: unique; also the name of its picture.
        fragment: what follows `/page` in the address.
        act: what is done on the page until the state is there.
        site: the address of `Scene`.
        before: what is done before the page is opened.
        prepare: what Airflow or the buckets have to be like.
    """

    name: str
    fragment: str
    act: Act
    site: Site = "page"
    before: Act = lambda page: None
    prepare: Callable[[Scene], None] = lambda scene: None


def _wait_for(selector: str) -> Act:
    return lambda page: page.locator(selector).first.wait_for()


_LISTED = _wait_for("tr[data-pipeline]")
_SHOWN = _wait_for("#checkpoints tbody tr")


def _press(button: str) -> Act:
    def press(page: Page) -> None:
        page.locator(button).first.click()
        page.get_by_role("dialog").wait_for()
        page.wait_for_load_state("networkidle")

    return press


def _look_for_a_row(value: str) -> Act:
    def look(page: Page) -> None:
        page.locator("#results-table option").first.wait_for(state="attached")
        page.locator("#row-column").select_option(index=0)
        page.get_by_label("Value").fill(value)
        page.get_by_role("button", name="Find").click()
        page.locator("#results .note, #results .found").first.wait_for()

    return look


def _find_price(page: Page) -> None:
    page.locator("#row-column option[value=price], #row-column option").first.wait_for(
        state="attached"
    )
    page.locator("#row-column").select_option("price")
    page.get_by_label("Value").fill("2")
    page.get_by_role("button", name="Find").click()
    page.locator("#results .found").first.wait_for()


def _choose_late(page: Page) -> None:
    page.locator("#results-table option").first.wait_for(state="attached")
    page.get_by_label("Table", exact=True).select_option("late")
    page.get_by_role("table", name="Newest rows of late").wait_for()


def _open_everything(page: Page) -> None:
    for summary in page.locator("summary").all():
        if summary.is_visible():
            summary.click()


def _open_what_if(page: Page) -> None:
    page.locator("#whatif-open summary").click()
    page.locator("#whatif .note, #whatif table").first.wait_for()


def _filter_nothing(page: Page) -> None:
    page.get_by_role("searchbox").fill("no such thing")
    page.locator("#all").wait_for()


def _restore_several(page: Page) -> None:
    page.locator("#restore-several").click()
    at = time.gmtime(time.time() - 5)
    page.get_by_label("Sealed until (UTC)").fill(time.strftime("%Y-%m-%dT%H:%M:%S", at))
    page.get_by_role("dialog").locator("code.id").first.wait_for()
    page.wait_for_load_state("networkidle")


def _answer(status: int, body: dict[str, Any]) -> Act:
    """Let Airflow answer so when a run is asked for, and say that the run has ended so."""

    def answer(page: Page) -> None:
        def respond(route: Any) -> None:
            if route.request.method == "POST":
                route.fulfill(status=status, json=body)
            elif route.request.url.endswith("/taskInstances"):
                route.fulfill(json={"task_instances": body.get("tasks", [])})
            else:
                route.fulfill(json=body)

        page.route("**/api/v2/dags/**", respond)

    return answer


def _ask_for_restore(page: Page) -> None:
    page.locator("[id^=restore-]").first.click()
    page.locator(".report dl").wait_for()
    page.get_by_role("dialog").get_by_label("Reason").fill("a bad file came in")
    page.locator("#dialog-go").click()
    page.locator("dialog .note").wait_for()


def _hang(page: Page) -> None:
    page.route("**/api/streams**", lambda route: None)


def _log_out(page: Page) -> None:
    page.route("**/api/streams**", lambda route: route.fulfill(status=401, json={}))


def _lose_the_answer(page: Page) -> None:
    _SHOWN(page)
    page.route("**/api/streams/**", lambda route: route.abort())
    page.locator("#banner .note").wait_for()


def _turn_the_page_back(page: Page) -> None:
    _SHOWN(page)
    page.locator("#page-older").click()
    page.locator("#page-newest:enabled").wait_for()


def _show_abandoned(page: Page) -> None:
    _SHOWN(page)
    page.locator("#which").select_option("abandoned")
    page.get_by_text("left behind", exact=True).first.wait_for()


def _read_the_chart(page: Page) -> None:
    _SHOWN(page)
    page.locator("#sources svg[tabindex]").first.focus()
    page.keyboard.press("Home")


_WIDE = f"#/{MORE_STREAMS[6]}"
_TASKS = [{"task_id": "check", "state": "success"}, {"task_id": "stop", "state": "running"}]

STATES: Final = [
    State("list", "", _LISTED),
    State("list without a match", "", _filter_nothing),
    State("list for a viewer", "", _LISTED, site="viewer"),
    State("list empty", "", _wait_for(".empty"), site="empty"),
    State("list without store", "", _LISTED, site="away"),
    State("loading", "", _wait_for(".loading"), before=_hang),
    State("logged out", "", _wait_for("#banner .note"), before=_log_out),
    State("running", "#/flights", _SHOWN),
    State("running for a viewer", "#/flights", _SHOWN, site="viewer"),
    State("running in a panel", "?dag=flights.recover", _SHOWN),
    State("running without answer", "#/flights", _lose_the_answer),
    State("stream without store", "#/flights", _wait_for("#banner .note"), site="away"),
    State("a point of a chart", "#/flights", _read_the_chart),
    State("tables and words", "#/flights", _open_everything),
    State("older checkpoints", "#/flights", _turn_the_page_back),
    State("abandoned checkpoints", "#/flights", _show_abandoned),
    State("a row that is not there", "#/flights", _look_for_a_row("7")),
    State("restore", "#/flights", _press("[id^=restore-]")),
    State(
        "restore goes on",
        "#/flights",
        _ask_for_restore,
        before=_answer(200, {"state": "running", "tasks": _TASKS}),
    ),
    State("restore done", "#/flights", _ask_for_restore, before=_answer(200, {"state": "success"})),
    State(
        "restore failed", "#/flights", _ask_for_restore, before=_answer(200, {"state": "failed"})
    ),
    State("restore refused", "#/flights", _ask_for_restore, before=_answer(403, {"detail": "no"})),
    State("restore several", "", _restore_several),
    State("pin", "#/flights", _press("[id^=pin-]")),
    State("unpin", "#/ferries", _press("[id^=pin-]")),
    State("check", "#/flights", _press("[id^=check-]")),
    State("diff", "#/flights", _press("[id^=diff-]")),
    State("deploy", "#/flights", _press("#deploy")),
    State("stop", "#/flights", _press("#stop")),
    State("start", "#/clicks", _press("#start")),
    State("start with a paused DAG", "#/orders", _press("#start")),
    State("abort a barrier", "#/ferries", _press("[id^=abort-]")),
    State("failed", "#/meters", _wait_for("#why-failed")),
    State("why failed", "#/meters", _press("#why-failed")),
    State("line of the spec", "#/meters", _press("#spec-line")),
    State("no spec on this host", "#/orders", _press("#spec-line")),
    State("stopped", "#/clicks", _SHOWN),
    State("finished", "#/weather", _SHOWN),
    State("awaiting approval", "#/taxis", _wait_for(".question")),
    State("may not approve", "#/taxis", _wait_for(".question"), site="viewer"),
    State("down", "#/orders", _SHOWN),
    State("failed checks", "#/orders", _wait_for("#quality .found")),
    State("never ran", "#/tides", _wait_for("#checkpoints .empty")),
    State("starting", "#/buses", _SHOWN, prepare=lambda scene: scene.begin_start()),
    State("starting for the first time", "#/first", _wait_for("#checkpoints .empty")),
    State("stopping", "#/ferries", _SHOWN),
    State("restoring", "#/trains", _SHOWN),
    State("draining", "#/trams", _SHOWN),
    State("silent source", "#/rivers", _SHOWN),
    State("long names", _WIDE, _SHOWN),
    State("what if", "#/flights", _open_what_if),
    State("what if answered", "#/shop", _open_what_if, site="tables"),
    State("results", "#/shop", _wait_for("#results table"), site="tables"),
    State("late rows", "#/shop", _choose_late, site="tables"),
    State("a row found", "#/shop", _find_price, site="tables"),
    State("job", "#/clicks", _wait_for("#queries table"), site="job"),
    State("restore a job", "#/clicks", _press("[id^=restore-]"), site="job"),
    State("no such stream", "#/nowhere", _wait_for("#banner .note")),
    State("error codes", "/../errors", _wait_for("table")),
]
