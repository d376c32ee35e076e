"""What the page gets to know of a stream, on a store in memory; Airflow is not imported here."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from tests.manual_clock import ManualClock
from tests.operators.history import GALLERY, SECOND, History, drives, drove, gallery
from tests.servers.memory_store import Fault, MemoryStore, StoreRequest

from tidegate.checkpoints import slot_index
from tidegate.checkpoints.checkpoint_specs import write_spec
from tidegate.checkpoints.driver_reports import DriverStatus
from tidegate.checkpoints.driver_requests import DesiredState
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.pipeline_overview import DriverOverview
from tidegate.checkpoints.restore import RestoreEvent, record_restore_event
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TransientError
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.operators import stream_view
from tidegate.operators.page_data import (
    build_lateness_charts,
    describe_checkpoint_epoch,
    describe_frontier_holder,
    diagnose_stream,
    list_open_barriers,
)
from tidegate.operators.stream_view import StreamView, build_unknown_row


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts of ten epochs, tables of five, index pages of eight.

    A short history has several of each.
    """
    monkeypatch.setattr(stream_view, "CHART_POINTS", 10)
    monkeypatch.setattr(slot_index, "SLOTS_PER_PAGE", 8)


@pytest.fixture
def gets() -> list[str]:
    """Keys of every object that was read."""
    return []


@pytest.fixture
def store(gets: list[str]) -> MemoryStore:
    """Counts what is read from it."""

    def hook(request: StoreRequest) -> Fault | None:
        if request.verb == "get":
            gets.append(request.key)
        return None

    return MemoryStore(hook=hook)


def slots(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Where the rows lie."""
    return [(row["timeline"], row["slot"]) for row in rows]


def pages(stream: StreamView, **asked: Any) -> list[tuple[int, int]]:
    """Every page of the table, one after another."""
    found, before = [], None
    while True:
        page = stream.checkpoint_page(before, limit=5, **asked)
        found += slots(page["rows"])
        if page["next"] is None:
            return found
        before = tuple(page["next"])


def test_charts_end_at_the_newest_epoch(store: MemoryStore) -> None:
    """Of a long history the newest epochs are drawn, oldest first, with frontiers, holder and rows
    of each.
    """
    history = History(store, "p")
    history.extend(14)
    points = StreamView(store, "p").detail(span=10)["points"]
    assert slots(points) == [(0, slot) for slot in range(5, 15)]
    assert (points[-1]["holder"], set(points[-1]["members"])) == ("EWR/0", {"EWR", "JFK", "LGA"})
    assert points[-1]["members"]["EWR"] == points[-1]["frontier"]
    assert points[-1]["read"] > points[-2]["read"]


@pytest.mark.parametrize(
    "why", ["no data", "idle timer running", "open barrier", "no punctuation", "buffered rows"]
)
def test_who_holds_the_frontier_is_shown(store: MemoryStore, why: str) -> None:
    """Partition, reason and since when, as the newest epoch has them."""
    history = History(store, "p", why=why)
    history.extend(2)
    shown = StreamView(store, "p").detail()["holder"]
    assert (shown["member"], shown["why"], shown["since"] > 0) == ("EWR/0", why, True)


def test_the_holder_is_that_of_the_frontiers_shown() -> None:
    """The newest report may be of another moment than the newest epoch."""
    body = {"holder": {"member": "JFK/0", "why": "no data", "since": 1}}
    report = DriverStatus(token=1, driver="d", step="x", at=0, body=body)
    driver = DriverOverview(None, report)
    store = MemoryStore()
    History(store, "p").extend(1)
    newest = SlotLog(store, "p").head().record
    shown = [describe_frontier_holder(driver, record) for record in (newest, None)]
    assert [one and one["member"] for one in shown] == ["EWR/0", "JFK/0"]


def test_a_refresh_reads_what_is_new(store: MemoryStore, gets: list[str]) -> None:
    """Epochs are read once, and sent once to a page that says what it has.

    After a restore it gets all of them.
    """
    history, clock = History(store, "p"), ManualClock()
    old = history.extend(12)
    stream = StreamView(store, "p", clock=clock)
    stream.detail(span=10)
    history.extend(2)
    clock.sleep(5)
    gets.clear()
    answer = stream.detail(since=(0, 12), span=10)
    assert (slots(answer["points"]), answer["partial"]) == ([(0, 13), (0, 14)], True)
    assert sum("/slots/" in key for key in gets) <= 4  # two of them to find the head
    history.restore(old[5])
    history.extend(1)
    clock.sleep(5)
    answer = stream.detail(since=(0, 14), span=10)
    assert (slots(answer["points"]), answer["partial"]) == (
        [*((0, slot) for slot in range(1, 7)), (1, 7)],
        False,
    )


def test_many_viewers_share_one_look(store: MemoryStore, gets: list[str]) -> None:
    """Within a moment a second summary costs nothing."""
    History(store, "p").extend(2)
    stream = StreamView(store, "p", clock=ManualClock())
    first = stream.summary()
    gets.clear()
    assert stream.summary() == first
    assert gets == []


def test_a_long_past_is_drawn_in_steps(store: MemoryStore) -> None:
    """All epochs on one chart are a sample of them, evenly spread, with the newest."""
    History(store, "p").extend(35)
    points = StreamView(store, "p").detail(span=0)["points"]
    assert slots(points) == [(0, slot) for slot in range(3, 36, 4)]


def test_the_table_is_paged_through_the_whole_lineage(store: MemoryStore) -> None:
    """Newest first, across a restore, each checkpoint once.

    Those left behind have a table of their own.
    """
    history = History(store, "p")
    old = history.extend(20)
    history.restore(old[11])
    history.extend(16)
    stream = StreamView(store, "p")
    assert pages(stream) == [
        *((1, s) for s in range(28, 12, -1)),
        *((0, s) for s in range(12, 0, -1)),
    ]
    assert pages(stream, abandoned=True) == [(0, s) for s in range(20, 12, -1)]


def test_a_deep_past_is_paged_from_the_index(store: MemoryStore, gets: list[str]) -> None:
    """Once the index is there, an old page of the table costs the manifests of its rows."""
    History(store, "p").extend(60)
    stream = StreamView(store, "p", clock=ManualClock())
    everything = pages(stream)
    assert len(everything) == 60
    gets.clear()
    assert slots(stream.checkpoint_page((0, 20), limit=5)["rows"]) == [
        (0, slot) for slot in range(19, 14, -1)
    ]
    assert sum("/slots/" in key for key in gets) < 8


def test_a_row_says_what_speaks_for_and_against_a_checkpoint(store: MemoryStore) -> None:
    """The row has pins, damage and the verdict of quality.

    What is damaged cannot be restored from here.
    """
    history = History(store, "p")
    epochs = history.extend(6)
    roots = RootsFile(store, "p")
    roots.pin("good", epochs[1].id, who="ann", why="known")
    roots.condemn_damaged(epochs[2].id, "checksum of one file")
    history.checked("fail", epochs[4].id)
    rows = {row["slot"]: row for row in StreamView(store, "p").checkpoint_page()["rows"]}
    assert rows[2]["pins"] == ("good",)
    assert (rows[3]["restorable"], rows[3]["verified"], rows[3]["condemned"]) == (
        False,
        {"verdict": "damaged"},
        "damaged: checksum of one file",
    )
    assert (rows[6]["healthy"], rows[6]["restorable"], rows[6]["bytes"]) == (False, True, 311_000)


def test_one_damaged_manifest_does_not_hide_the_others(store: MemoryStore) -> None:
    """A person chooses the checkpoint to go back to in this table."""
    History(store, "p").extend(60)
    pages(StreamView(store, "p"))  # writes the index
    store.put(StreamView(store, "p").log.layout.slot_key(0, 18), b"garbage")
    rows = StreamView(store, "p").checkpoint_page((0, 20), limit=5)["rows"]
    assert slots(rows) == [(0, slot) for slot in range(19, 14, -1)]


def test_a_checkpoint_shows_its_dead_letters_and_where_the_spec_changed(store: MemoryStore) -> None:
    """A change names its fields, and is on the first checkpoint with the new spec."""
    history = History(store, "p")
    history.extend(4)
    first = StreamView(store, "p").checkpoint_page()["rows"][0]
    assert (first["dead"], first["spec"], first["changed"]) == (0, "s", None)
    epochs = [{"dead": dead, "spec": spec} for dead, spec in ((9, "new"), (8, "new"), (7, "old"))]
    found = [describe_checkpoint_epoch([*epochs, None], nth, "{} -> {}".format) for nth in range(4)]
    assert [row["changed"] for row in found] == [None, "old -> new", None, None]
    assert [row["dead"] for row in found] == [9, 8, 7, None]


def test_an_epoch_that_retires_while_the_page_is_open_is_no_longer_offered(
    store: MemoryStore,
) -> None:
    """The charts remember epochs; the table asks the index whether they are still there."""
    history = History(store, "p")
    history.extend(6, ago=100)
    view = StreamView(store, "p", fresh=0.0)
    view.detail()
    assert [row["restorable"] for row in view.checkpoint_page()["rows"]] == [True] * 6
    Retention(history.log, RetentionPolicy(keep_last=2, keep_for=0, grace=0), external=tuple).run()
    offered = [row["slot"] for row in view.checkpoint_page()["rows"] if row["restorable"]]
    assert offered == [6, 5]


def test_the_newest_checkpoint_of_a_time_is_found(store: MemoryStore) -> None:
    """What was sealed later is not shown."""
    sealed = History(store, "p").extend(20, ago=100)
    wanted = sealed[7]
    page = StreamView(store, "p").checkpoint_page(limit=3, until=wanted.created_at // 1000 + 1)
    assert [row["id"] for row in page["rows"]] == [str(m.id) for m in sealed[7:4:-1]]


def test_the_newest_checkpoint_of_a_time_is_found_where_clocks_differ(store: MemoryStore) -> None:
    """Two hosts took turns, and the clock of one is half a minute behind."""
    history, now = History(store, "p"), 1_800_000_000
    seconds = [0, 10, 20, -10, 40, 50, 20, 70, 200, 210]
    sealed = [history.epoch(now + second) for second in seconds]
    for until in (20, 30, 60):
        page = StreamView(store, "p").checkpoint_page(until=(now + until) * 1000 + 1)
        ids = [str(one.id) for one, at in zip(sealed, seconds, strict=True) if at <= until]
        assert [row["id"] for row in page["rows"]] == ids[::-1]


def test_a_time_of_which_the_newest_checkpoint_is_gone_leads_to_an_older_one(
    store: MemoryStore,
) -> None:
    """A restore to a time skips epochs that were retired, and those that are damaged."""
    history = History(store, "p")
    sealed, roots = history.extend(20, ago=100), RootsFile(store, "p")
    roots.pin("kept", sealed[1].id, who="ann", why="known")
    policy = RetentionPolicy(keep_last=14, keep_for=0, grace=0)
    assert Retention(history.log, policy, external=tuple).run().retired
    roots.condemn_damaged(sealed[9].id, "checksum of one file")
    view = StreamView(store, "p")
    for newest, found in ((4, 1), (9, 8)):
        until = sealed[newest].created_at // 1000 + 1
        rows = view.checkpoint_page(limit=1, until=until, restorable=True)["rows"]
        assert [row["id"] for row in rows] == [str(sealed[found].id)]


def test_a_time_long_ago_is_found_by_few_reads(store: MemoryStore, gets: list[str]) -> None:
    """Neither the pages of the index nor the epochs after it are read one by one."""
    sealed = History(store, "p", every=60.0).extend(200, ago=100)
    pages(StreamView(store, "p"))  # writes the pages of the index, as a driver does
    gets.clear()
    view = StreamView(store, "p")
    rows = view.checkpoint_page(limit=1, until=sealed[20].created_at // 1000 + 1)["rows"]
    assert [row["id"] for row in rows] == [str(sealed[20].id)]
    assert sum("/index/" in key for key in gets) == 1
    assert sum("/slots/" in key for key in gets) <= 9


def test_a_log_that_begins_again_is_not_shown_with_the_old_one(store: MemoryStore) -> None:
    """A wipe leaves the same timeline and slots to other epochs, of another uid."""
    old = History(store, "p").extend(6)
    view = StreamView(store, "p", fresh=0)
    view.detail()
    for entry in list(store.list_objects("p/")):
        store.delete(entry.key)
    new = History(store, "p", uid="v").extend(3)
    shown = view.detail(since=(0, old[-1].slot))
    assert shown["partial"] is False
    assert [point["id"] for point in shown["points"]] == [str(manifest.id) for manifest in new]


def test_a_search_for_a_time_does_not_remember_a_wiped_log(store: MemoryStore) -> None:
    """The times of its slots are those of the log that is there now."""
    History(store, "p").extend(6, ago=100)
    view, now = StreamView(store, "p"), 4_000_000_000_000
    view.checkpoint_page(until=now)
    for entry in list(store.list_objects("p/")):
        store.delete(entry.key)
    new = History(store, "p", uid="v").extend(3)
    rows = view.checkpoint_page(until=now)["rows"]
    assert [row["id"] for row in rows] == [str(manifest.id) for manifest in reversed(new)]


def test_a_checked_checkpoint_remembers_it(store: MemoryStore) -> None:
    """The page remembers the answer to whether a checkpoint is whole, for everyone.

    Nothing is written.
    """
    epoch = History(store, "p").extend(1)[0]
    stream = StreamView(store, "p")
    assert stream.checkpoint_page()["rows"][0]["verified"] is None
    assert stream.verify(str(epoch.id))["verdict"] == "damaged"  # a history's files do not exist
    assert stream.checkpoint_page()["rows"][0]["verified"]["verdict"] == "damaged"
    assert RootsFile(store, "p").read().condemned == {}


def test_barriers_are_found_far_behind_the_charts(store: MemoryStore) -> None:
    """A daily barrier lies hundreds of epochs back.

    It is shown with who was missing, and an open one with who waits.
    """
    History(store, "p").extend(48)
    found = StreamView(store, "p").detail(span=10)
    assert [(b["id"], b["outcome"], b["missing"]) for b in found["barriers"]] == [
        (4, "complete", []),
        (3, "incomplete", ["LGA/0"]),
        (2, "complete", []),
        (1, "complete", []),
    ]
    assert set(found["barriers"][0]["arrivals"]) == {"EWR/0", "JFK/0", "LGA/0"}
    assert found["open_barriers"] == []


def test_an_open_barrier_says_who_is_missing_and_until_when(store: MemoryStore) -> None:
    """By the timeout of the spec that sealed the epoch; a barrier behind it waits for its turn."""
    spec = PipelineSpec.model_validate(
        {
            "name": "p",
            "sources": {
                "EWR": {
                    "path": "inbox/",
                    "schema": {"at": "timestamp", "kind": "string", "id": "long"},
                    "event_time": "at",
                    "lag": "1m",
                    "barriers": {"kind": "kind", "types": ["day"], "id": "id"},
                }
            },
            "barriers": {"timeout": "30s"},
        }
    )
    write_spec(store, spec)
    history = History(store, "p")
    newest = history.extend(11)[-1]
    clock, opened = 500 * SECOND, 480 * SECOND
    open_barriers = [
        {"id": 3, "opened": opened, "arrivals": {"EWR/0": {"at": opened}}},
        {"id": 4, "opened": opened, "arrivals": {"LGA/0": {"at": opened}}},
    ]
    decider = {
        "clock": clock,
        "barriers": {"open": open_barriers, "last_closed": 485 * SECOND},
    }
    statuses = {"EWR/0": "active", "JFK/0": "done", "LGA/0": "active"}
    decision = {**newest.decision, "statuses": statuses}
    sealed = newest.model_copy(update={"decider": decider, "decision": decision})
    first, second = list_open_barriers(sealed, spec.barrier_timeout)
    # Times of the pipeline's clock, which outages hold back, are shown by the wall clock.
    opened_at = sealed.created_at // 1000 - 20_000
    assert (first["id"], first["missing"], first["opened"]) == (3, ["LGA/0"], opened_at)
    assert first["arrivals"] == {"EWR/0": opened_at}
    # It is 15 s after the last barrier closed, so that 15 of its 30 s are left.
    assert first["closes"] == sealed.created_at // 1000 + 15_000
    assert (second["missing"], second["closes"]) == (["EWR/0"], None)
    assert list_open_barriers(sealed, None)[0]["closes"] is None
    view = StreamView(store, "p")
    known = sealed.model_copy(update={"spec_digest": spec.digest()})
    assert view._read_open_barriers(known)[0]["closes"] == first["closes"]


def test_trails_pins_and_requests_are_shown(store: MemoryStore) -> None:
    """Who restored what, when and why; what was only asked for as well."""
    history = gallery(store, 4)
    record_restore_event(
        store,
        "flights",
        "run-1",
        RestoreEvent.ASKED,
        who="uwe",
        target="t1-000270-aa",
        head="t1-000290-bb",
        why="late files",
    )
    record_restore_event(store, "flights", "run-1", RestoreEvent.REJECTED, who="olga")
    found = StreamView(store, "flights").detail()
    assert [(r["who"], r["why"], r["fork_slot"], r["slot"]) for r in found["restores"]] == [
        ("ann", "a bad file came in", 9, 13)
    ]
    assert [(step["what"], step["who"]) for step in found["trail"][0]["steps"]] == [
        ("asked", "uwe"),
        ("rejected", "olga"),
    ]
    assert [(pin["name"], pin["who"]) for pin in found["pins"]] == [("before_fix", "ann")]
    assert [(r["kind"], r["name"]) for r in found["requests"]] == [("savepoint", "release_7")]
    assert found["timeline"] == history.log.head().timeline == 1


def test_every_state_is_shown_with_its_reason(store: MemoryStore) -> None:
    """A glance at the list says which stream is well, and of the others why they are not."""
    gallery(store, 4)
    rows = {name: StreamView(store, name).summary(paused=name == "orders") for name in GALLERY}
    assert {name: (row["state"], row["tone"]) for name, row in rows.items()} == {
        "flights": ("running", "good"),
        "taxis": ("waiting", "warn"),
        "orders": ("down", "bad"),
        "clicks": ("stopped", "off"),
        "meters": ("failed", "bad"),
        "weather": ("finished", "good"),
        "tides": ("new", "off"),
    }
    assert [finding["says"] for finding in rows["orders"]["findings"]] == [
        "it should run, and no one drives it",
        "its DAG is paused in Airflow, so nothing starts it",
        "quality checks failed: “few rows are late”",
    ]
    assert [finding["says"] for finding in rows["taxis"]["findings"]] == [
        "31 epochs are sealed but not in the tables yet"
    ]
    assert rows["clicks"]["why"] == "stopped by ann: maintenance of the shop"


def test_checks_show_owner_limit_sample_and_past(store: MemoryStore) -> None:
    """Failed checks come first. Before the first run there are none."""
    gallery(store, 4)
    found = StreamView(store, "orders").read_checks()
    failed, passed = found["checks"]
    assert (failed["id"], failed["owner"], failed["value"]) == ("late_ratio", "ann", 0.7)
    assert (failed["limit"], failed["sample"][0]["_epoch"], failed["run"]) == (0.1, 3, "r1")
    assert [run["values"]["dead_ratio"] for run in found["runs"]] == [0.02, 0.03, 0.01]
    assert (passed["passed"], passed["owner"], passed["sample"]) == (True, "ann", [])
    assert StreamView(store, "tides").read_checks() == {"at": None, "checks": [], "runs": []}


def test_a_stream_that_stopped_sealing_needs_attention(store: MemoryStore) -> None:
    """A live driver with an old checkpoint and a backlog is not well, and words of its predecessor
    do not count.
    """
    history = History(store, "p")
    history.extend(2, ago=600)
    keeper = drives(store, "p")
    history.wanted(DesiredState.RUN)
    waits: dict[str, Any] = {"lag": {"web/0": 3, "web/1": 4}, "late_uploads": {"files": 3}}
    history.says(
        "running",
        unpublished=40,
        trouble={"message": "the catalog is away"},
        silent={"LGA": 7_500_000_000},
        stale={"EWR": 95.2},
        **waits,
    )
    found = StreamView(store, "p").summary()
    assert (found["state"], found["tone"]) == ("running", "warn")
    assert (found["lag"], found["late_uploads"]) == ({"web": 7}, {"files": 3})
    assert [finding["says"] for finding in found["findings"]] == [
        "the newest checkpoint is 10 min old",
        "40 sealed epochs are not in the tables yet",
        "source LGA has said nothing for 2 h",
        "rows of EWR are seen 95 s after their arrival (p95), beyond the goal",
        "the catalog is away",
    ]
    history.says("failed", token=99, error={"message": "of someone else"})
    assert StreamView(store, "p").summary()["error"] is None
    keeper.stop()


NOW = 1_800_000_000_000
_WELL: dict[str, Any] = {"state": "running", "why": "", "sealed_at": NOW - 1000}


def _list_findings(**facts: Any) -> list[str]:
    return [found["says"] for found in diagnose_stream({**_WELL, **facts}, NOW)]


def _verdict(age: int, verdict: str = "pass", **more: Any) -> dict[str, Any]:
    at = datetime.fromtimestamp(NOW / 1000 - age, UTC).isoformat().replace("+00:00", "Z")
    return {"at": at, "verdict": verdict, "failed": [], **more}


def test_a_job_that_has_nothing_to_do_is_well() -> None:
    """It seals nothing meanwhile; a pipeline does."""
    old = {"sealed_at": NOW - 18_000_000}
    assert _list_findings(**old) == ["the newest checkpoint is 5 h old"]
    assert _list_findings(**old, queries={"q": {"batch": 7}}) == []


def test_a_verdict_gets_old_while_epochs_are_sealed() -> None:
    """A pass of a year ago says nothing about today; in a pause of the stream none is due."""
    assert _list_findings(quality=_verdict(1700)) == []
    stale = "the quality checks last ran 40 min ago, and epochs were sealed since"
    assert _list_findings(quality=_verdict(2400)) == [stale]
    assert stale in _list_findings(quality=_verdict(2400, "fail"))
    assert _list_findings(quality=_verdict(2400, every=3600.0)) == []
    assert _list_findings(quality=_verdict(2400), sealed_at=NOW - 2_300_000, state="stopped") == []
    (unknown,) = _list_findings(quality={"verdict": "pass"})
    assert "an unknown time ago" in unknown
    (never,) = _list_findings(quality=None, run_since=NOW - 2_400_000)
    assert "have never run" in never
    assert _list_findings(quality=None, run_since=NOW - 60_000) == []


def test_many_sources_with_one_trouble_are_one_finding() -> None:
    """The worst are named, and how many more there are."""
    waits = {f"s{n}": 60.0 + n for n in range(10)}
    assert _list_findings(stale=waits, silent={"a": 100, "b": 200}) == [
        "sources b, a have said nothing for 3 min",
        "rows of s9, s8, s7 and 7 more are seen up to 69 s after their arrival (p95), beyond the goal",
    ]


def test_a_trouble_that_is_also_the_reason_is_said_once() -> None:
    """The driver reports why it waits, and the trouble that it waits for."""
    found = _list_findings(state="waiting", why="the store is away", trouble="the store is away")
    assert found == ["the store is away"]


def test_a_restore_under_way_says_who_began_it(store: MemoryStore) -> None:
    """While a restore runs nothing else is said, though no driver lives."""
    history = History(store, "p")
    history.extend(1)
    drove(store, "p")
    history.wanted(DesiredState.RECOVERING)
    found = StreamView(store, "p").summary()
    assert (found["state"], found["why"]) == (
        "recovering",
        "a restore is under way, started by ann",
    )


def test_a_bucket_that_does_not_answer_is_a_state() -> None:
    """The list goes on and says so."""
    with pytest.raises(TransientError) as caught:
        StreamView(MemoryStore(hook=lambda request: Fault.REFUSED), "p").summary()
    found = build_unknown_row("p", caught.value)
    assert (found["state"], found["tone"], found["away"]) == ("unknown", "bad", True)
    assert found["findings"][0]["says"] == found["why"]


def test_what_differs_and_what_a_restore_takes_back(store: MemoryStore) -> None:
    """Pins and `latest` are understood; numbers are those of the log."""
    history = History(store, "p")
    epochs = history.extend(5)
    RootsFile(store, "p").pin("good", epochs[1].id, who="ann")
    stream = StreamView(store, "p")
    read = epochs[4].counters.read - epochs[1].counters.read
    assert stream.diff("good", "latest")["counters"]["read"] == read
    plan = stream.restore_impact("good")
    assert (plan["epochs_rewound"], plan["rows"]["read"], plan["since"]) == (
        3,
        read,
        epochs[1].created_at // 1000,
    )


def test_the_curve_of_lateness() -> None:
    """At a lag of a minute the rows up to a minute behind are in time.

    A target names the least lag that is enough.
    """
    buckets = {"0": 90, "1": 0, str(_bucket(60)): 9, str(_bucket(3600)): 1}
    found = build_lateness_charts([{"one": {"gamma": 1.01, "buckets": buckets}}, {}])
    one = found["sources"]["one"]
    assert (one["rows"], one["in_order"], sum(one["bars"])) == (100, 90, 10)
    assert one["bars"][found["bars"].index(60)] + one["bars"][found["bars"].index(300)] == 9
    curve = dict(one["curve"])
    assert curve[0.0] == 0.1
    assert min(curve.values()) == 0.0
    lags = [target["lag"] for target in one["targets"]]
    assert lags[0] == pytest.approx(60, rel=0.02)
    assert lags[1] == pytest.approx(3600, rel=0.02)


def test_no_rows_no_curve() -> None:
    """Idle sources have nothing to draw and do not divide by zero."""
    assert build_lateness_charts([{}, {}])["sources"] == {}
    empty = build_lateness_charts([{"one": {"gamma": 1.01, "buckets": {}}}])["sources"]["one"]
    assert (empty["rows"], empty["curve"]) == (0, [])


def _bucket(seconds: float) -> int:
    from math import ceil, log

    return ceil(log(seconds * 1_000_000) / log(1.01)) + 1
