"""What a person does on the Streams page in a real Chromium: restore, start, stop, approve."""

from __future__ import annotations

import time

import pytest
from playwright.sync_api import Route, expect

from tests.e2e.page.streams_page import PAGE_MARKS, Open, Site, answer_starts
from tests.operators.history import GALLERY
from tidegate.checkpoints.restore import RestoreEvent, record_restore_event

pytestmark = PAGE_MARKS


def test_what_a_busy_airflow_refuses_is_asked_again(show: Open) -> None:
    """A restore is asked for under one id until Airflow says that it has it, and goes on to its
    end.
    """
    page, asked, answers = show("#/flights", quiet=False), list[str](), [500, 503, 409]

    def airflow(route: Route) -> None:
        if route.request.method == "POST":
            asked.append(route.request.post_data_json["dag_run_id"])  # type: ignore[index]
            route.fulfill(status=answers[len(asked) - 1], json={"detail": "database is locked"})
        else:
            tasks = route.request.url.endswith("/taskInstances")
            route.fulfill(json={"task_instances": []} if tasks else {"state": "success"})

    page.route("**/api/v2/dags/**", airflow)
    row = page.locator("#checkpoints tbody tr").nth(2)
    row.hover()
    row.get_by_role("button", name="Restore").click()
    dialog = page.get_by_role("dialog", name="Restore flights")
    dialog.get_by_label("Reason").fill("a bad object came in")
    dialog.get_by_role("button", name="Restore").click()
    expect(dialog).to_contain_text("Done.")
    assert (len(asked), len(set(asked))) == (3, 1)


def test_a_stream_is_started_and_stopped_where_its_state_is_shown(show: Open) -> None:
    """Two clicks each; every one is a run of a DAG, and a reason goes with the stop."""
    page = show("#/clicks", quiet=False)
    asked = answer_starts(page)
    page.get_by_role("button", name="Start…").click()
    dialog = page.get_by_role("dialog", name="Start clicks")
    dialog.get_by_role("button", name="Start").click()
    expect(dialog).to_contain_text("Airflow has begun")
    page = show("#/flights", quiet=False)
    stops = answer_starts(page)
    page.get_by_role("button", name="Stop…").click()
    dialog = page.get_by_role("dialog", name="Stop flights")
    dialog.get_by_label("Reason").fill("release")
    dialog.get_by_role("button", name="Stop").click()
    expect(dialog).to_contain_text("running")
    assert asked == [{"url": "clicks.stream/dagRuns", "conf": {}}]
    page = show("#/flights", quiet=False)
    replaced = answer_starts(page)
    page.get_by_role("button", name="Stop…").click()
    page.get_by_label("It hangs").check()
    page.get_by_role("button", name="Replace the driver").click()
    expect(page.get_by_role("dialog")).to_contain_text("running")
    stop = {"reason": "release", "replace": False}
    assert stops == [{"url": "flights.stop/dagRuns", "conf": stop}]
    assert replaced[0]["conf"] == {"reason": "", "replace": True}


def test_a_deploy_names_the_file_that_was_shown(show: Open) -> None:
    """What differs and the plan come first, and what the plan refuses cannot be deployed."""
    page = show("#/flights", quiet=False)
    asked = answer_starts(page)
    shown = {"digest": "d1", "changes": ["sources.b.lag: 1s -> 5s"], "plan": [], "refused": False}
    page.route("**/api/streams/flights.stream/deploy", lambda route: route.fulfill(json=shown))
    page.get_by_role("button", name="Deploy…").click()
    dialog = page.get_by_role("dialog", name="Deploy flights")
    expect(dialog).to_contain_text("sources.b.lag: 1s -> 5s")
    dialog.get_by_label("Reason").fill("slow feed")
    dialog.get_by_role("button", name="Deploy", exact=True).click()
    expect(dialog).to_contain_text("running")
    assert asked == [
        {"url": "flights.deploy/dagRuns", "conf": {"reason": "slow feed", "digest": "d1"}}
    ]
    dialog.get_by_role("button", name="Close").click()
    shown["refused"] = True
    page.get_by_role("button", name="Deploy…").click()
    expect(dialog).to_contain_text("The plan refuses it")
    expect(dialog.get_by_role("button", name="Deploy", exact=True)).to_be_disabled()


def test_a_run_that_was_asked_for_cannot_be_cancelled_by_its_window(show: Open) -> None:
    """The window offers to close itself, and to cancel only what Airflow has not taken."""
    page = show("#/flights", quiet=False)
    answer_starts(page)
    page.get_by_role("button", name="Stop…").click()
    dialog = page.get_by_role("dialog", name="Stop flights")
    dialog.get_by_role("button", name="Stop").click()
    expect(dialog).to_contain_text("running")
    expect(dialog.locator("#dialog-close")).to_have_text("Close")
    expect(dialog.get_by_label("Reason")).to_be_disabled()
    page = show("#/flights", quiet=False)
    page.route("**/api/v2/dags/**", lambda route: route.fulfill(status=403, json={}))
    page.get_by_role("button", name="Stop…").click()
    dialog = page.get_by_role("dialog", name="Stop flights")
    dialog.get_by_role("button", name="Stop").click()
    expect(dialog.get_by_role("alert")).to_contain_text("You may not do that")
    expect(dialog.locator("#dialog-close")).to_have_text("Cancel")
    expect(dialog.get_by_label("Reason")).to_be_enabled()


def test_a_stopped_stream_says_who_stopped_it_and_why(show: Open) -> None:
    """At the top of its page, where Start is."""
    header = show("#/clicks").locator("header.top")
    expect(header).to_contain_text("wanted: stopped, by ann: maintenance of the shop")


def test_several_streams_are_restored_to_one_time(show: Open) -> None:
    """Two clicks for all that need attention; each goes to its own checkpoint of that time."""
    page = show(quiet=False)
    asked = answer_starts(page)
    page.get_by_role("button", name="Restore several…").click()
    dialog = page.get_by_role("dialog", name="Restore several streams")
    ticked = dialog.locator("input[type=checkbox]:checked")
    assert {str(box.get_attribute("id")) for box in ticked.all()} == {
        "also-meters",
        "also-orders",
        "also-taxis",
    }
    at = time.gmtime(time.time() - 5)
    dialog.get_by_label("Sealed until (UTC)").fill(time.strftime("%Y-%m-%dT%H:%M:%S", at))
    dialog.get_by_label("Reason").fill("a wrong clock upstream")
    expect(dialog.locator("code.id")).to_have_count(6)
    dialog.get_by_role("button", name="Restore them").click()
    expect(dialog.locator(".note")).to_have_count(3)
    urls = sorted(one["url"] for one in asked)
    assert urls == [f"{name}.recover/dagRuns" for name in ("meters", "orders", "taxis")]
    assert len({one["conf"]["checkpoint"] for one in asked}) == 3


def test_runs_are_asked_for_one_after_another(show: Open) -> None:
    """Airflow's server on SQLite answers two such requests at once with a long wait and an error."""
    page = show(quiet=False)
    asked: list[Route] = []
    page.route("**/api/v2/dags/*/dagRuns", lambda route: asked.append(route))
    page.get_by_role("button", name="Restore several…").click()
    dialog = page.get_by_role("dialog", name="Restore several streams")
    at = time.gmtime(time.time() - 5)
    dialog.get_by_label("Sealed until (UTC)").fill(time.strftime("%Y-%m-%dT%H:%M:%S", at))
    dialog.get_by_label("Reason").fill("a wrong clock upstream")
    expect(dialog.locator("code.id")).to_have_count(6)
    dialog.get_by_role("button", name="Restore them").click()
    for number in range(3):
        page.wait_for_timeout(500)
        assert len(asked) == number + 1
        asked[number].fulfill(status=403, json={"detail": "no"})


def test_a_late_answer_about_another_time_is_not_restored(show: Open) -> None:
    """A person who corrects the time gets the checkpoints of the corrected time."""
    page = show(quiet=False)
    held: list[Route] = []
    streams = len(GALLERY) - 1  # one has no checkpoint
    page.get_by_role("button", name="Restore several…").click()
    dialog = page.get_by_role("dialog", name="Restore several streams")
    shown = dialog.locator("code.id")
    times = (time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - n)) for n in (5, 970))
    page.route(
        "**/checkpoints?limit=1*",
        lambda route: held.append(route) if len(held) < streams else route.continue_(),
    )
    dialog.get_by_label("Sealed until (UTC)").fill(next(times))
    while len(held) < streams:
        page.wait_for_timeout(50)
    dialog.get_by_label("Sealed until (UTC)").fill(next(times))
    expect(dialog.get_by_text("nothing was sealed until then").first).to_be_visible()
    expect(dialog.get_by_text("Looking…")).to_have_count(0)
    wanted = shown.evaluate_all("ids => ids.map(id => id.title)")
    with page.expect_response(lambda answer: "taxis.stream/impact" in answer.url):
        for route in held:
            route.continue_()
    page.wait_for_timeout(500)
    assert shown.evaluate_all("ids => ids.map(id => id.title)") == wanted


@pytest.mark.parametrize("refusal", [None, "you have asked for it", "only olga may answer"])
def test_only_who_may_approve_can_press_approve(
    show: Open, site: Site, refusal: str | None
) -> None:
    """A user who may not sees the reason; the user who asked may still withdraw the request."""
    since = int(time.time() * 1000) - 9_000
    question = {
        "task": "approve",
        "subject": "Restore flights?",
        "body": "",
        "options": ["Approve", "Reject"],
        "assigned": [],
        "since": since,
        "refusal": refusal,
    }
    run = {"kind": "recover", "dag_id": "flights.recover", "run_id": "r", "state": "running"}
    facts = {"who": "ann", "at": since, "ended": None, "conf": {}, "tasks": []}
    site.desk.shown, site.desk.approval = [{**run, **facts, "question": question}], True
    try:
        page = show("#/flights")
        asked = page.locator(".question")
        approve, reject = (asked.get_by_role("button", name=n) for n in ("Approve", "Reject"))
        expect(reject).to_be_enabled(enabled=refusal is None or "you" in refusal)
        expect(approve).to_be_enabled(enabled=refusal is None)
        if refusal is not None:
            expect(asked).to_contain_text(f"You cannot approve this: {refusal}.")
        page.locator("#checkpoints tbody tr").nth(2).get_by_role("button", name="Restore").click()
        dialog = page.get_by_role("dialog", name="Restore flights")
        expect(dialog).to_contain_text("Another person has to approve it")
        expect(dialog.get_by_role("button", name="Ask for it")).to_be_visible()
    finally:
        site.desk.shown, site.desk.approval = [], False


def test_the_end_of_a_refused_restore_is_told(show: Open, site: Site) -> None:
    """A request that someone refused does not vanish; the page says who, why, and what follows."""
    step = {"who": "uwe", "target": "t0-000001-aa", "head": "t0-000002-bb"}
    record_restore_event(site.store, "taxis", "asked-1", RestoreEvent.ASKED, **step)
    why = "uwe has asked for it and may not approve it as well"
    record_restore_event(
        site.store, "taxis", "asked-1", RestoreEvent.REFUSED, who="tidegate", detail=why
    )
    run = {"kind": "recover", "dag_id": "taxis.recover", "run_id": "asked-1", "state": "failed"}
    site.desk.shown = [{**run, "who": "uwe", "at": 0, "ended": 1, "conf": {}, "tasks": []}]
    try:
        note = show("#/taxis").locator("#answer")
        expect(note).to_contain_text("The restore that uwe asked for was refused by tidegate")
        expect(note).to_contain_text("may not approve it as well. Nothing was changed.")
    finally:
        site.desk.shown = []
