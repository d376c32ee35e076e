"""What happened to a stream, found in its bucket."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.operators.history import History, make_spec
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.driver_reports import DriverStatus, write_status
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.splice_requests import (
    SpliceRequest,
    create_splice_request,
    reject_splice_request,
)
from tidegate.errors import PoisonError
from tidegate.json_types import JsonView
from tidegate.operators.page_data import list_driver_events, list_verdict_events
from tidegate.operators.stream_view import StreamView


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 60))
def test_every_driver_is_found_with_few_reads(lives: list[int], retired: int) -> None:
    """Each driver's first epoch that is kept is an event; a driver costs a logarithm of reads."""
    epochs: list[dict[str, Any]] = [
        {"id": f"t0-{slot:06}-a", "slot": slot, "at": slot * 2_000, "token": token}
        | {"spec": "s" if token < 3 else "changed"}
        for slot, token in enumerate(
            (token for token, life in enumerate(lives, 1) for _ in range(life)), 1
        )
    ]
    reads = []

    def read_epoch(slot: int) -> JsonView | None:
        reads.append(slot)
        return epochs[slot - 1] if slot > retired else None

    kept = epochs[retired:] or epochs[-1:]
    found = list(list_driver_events(epochs[-1], read_epoch, "{} -> {}".format))
    firsts = {epoch["token"]: epoch["id"] for epoch in reversed(kept)}
    drivers = [event["checkpoint"] for event in found if event["kind"] == "driver"]
    assert drivers == sorted(firsts.values(), reverse=True)
    assert len(reads) <= len(drivers) * (len(epochs).bit_length() + 1)
    changed = [event["checkpoint"] for event in found if event["kind"] == "spec"]
    assert changed == ([firsts[3]] if {2, 3} <= firsts.keys() else [])


def test_the_bucket_tells_of_drivers_merges_and_verdicts() -> None:
    """A view reads all three; who decided and why is part of the event."""
    store = MemoryStore()
    history = History(store, "p")
    last = history.extend(5)[-1]
    history.checked("fail", last.id, [{"id": "late_ratio"}])
    request = SpliceRequest(
        id="s1", pipeline="p", origin="late", row_count=7, created_at=1, who="ann"
    )
    create_splice_request(store, request)
    reject_splice_request(store, "p", "s1", who="bob", why="too old", at=5_000_000)
    found = {event["kind"]: event for event in StreamView(store, "p").read_timeline()}
    assert found["merge"]["says"] == "rejected: 7 rows, splice request s1"
    assert (found["merge"]["who"], found["merge"]["at"]) == ("bob", 5_000)
    assert (found["verdict"]["why"], found["verdict"]["checkpoint"]) == ("late_ratio", str(last.id))
    assert found["driver"]["says"] == "the driver with token 1 began"


def test_deploys_are_told_with_who_and_why() -> None:
    """The one that counts and the one that waits; once it went back, its error and when."""
    # Not at the top: `make faults` runs the other tests on code without these names.
    from tidegate.checkpoints.deployed_specs import (
        Deploy,
        SpecCopy,
        confirm_deploy,
        note_failed_deploy,
        read_deployed,
        start_deploy,
    )
    from tidegate.operators.page_data import list_deploy_events

    store = MemoryStore()
    first, second = (SpecCopy(spec=text) for text in ("{}", '{"a":1}'))
    deploy = Deploy(digest=first.digest, who="ann", why="first", at=1_000_000)
    confirm_deploy(store, "p", deploy)
    start_deploy(store, "p", second, who="bob", why="more lag")

    def list_tellings() -> list[tuple[Any, ...]]:
        events = StreamView(store, "p").read_timeline()
        return [(event["who"], event["why"]) for event in events if event["kind"] == "spec"]

    assert list_tellings() == [("ann", "first"), ("bob", "more lag")]
    note_failed_deploy(store, "p", second.digest, PoisonError("no such column", code="x.y"))
    assert list_tellings() == [("ann", "first"), ("bob", "no such column")]
    told = [*list_deploy_events(read_deployed(store, "p"), lambda before, after: "")]
    assert (told[0]["at"], told[1]["says"].partition(",")[0]) == (1_000, "the deploy failed")


def test_deploys_are_told_with_what_they_changed() -> None:
    """Fields and values, of each deploy that drivers ran and of the one that waits."""
    from tidegate.checkpoints.deployed_specs import (
        Deploy,
        confirm_deploy,
        make_copy,
        start_deploy,
        write_copy,
    )

    store = MemoryStore()
    one, two, three = (make_copy(make_spec("p", ["a"], lag), {}) for lag in ("1h", "2h", "3h"))
    for who, copy in (("ann", one), ("uwe", two)):
        write_copy(store, "p", copy)
        confirm_deploy(store, "p", Deploy(digest=copy.digest, who=who, at=1), replaces=True)
    start_deploy(store, "p", three, who="bob", commit="12ab")
    events = {event["who"]: event["says"] for event in StreamView(store, "p").read_timeline()}
    assert list(events) == ["uwe", "ann", "bob"]
    assert events["uwe"].endswith('; it changed sources.a.lag: "1h" -> "2h"')
    assert events["bob"].endswith('; it changes sources.a.lag: "2h" -> "3h" (commit 12ab)')
    assert "changed" not in events["ann"]


def test_a_driver_s_death_is_told_before_the_next_epoch() -> None:
    """And its successor, which has sealed nothing yet."""
    store = MemoryStore()
    History(store, "p").extend(2)

    def list_tellings(holder: ProcessIdentity) -> list[str]:
        lease = Lease.acquire(store, "p", holder)
        body = {"state": "running", "started_at": lease.token * 1_000_000}
        write_status(
            store, "p", DriverStatus(token=lease.token, driver="d", step="wait", at=9, body=body)
        )
        events = StreamView(store, "p").read_timeline()
        return [event["says"].partition(":")[0] for event in events if event["kind"] == "driver"]

    dead = ProcessIdentity.this_process()
    dead = dead.model_copy(update={"start_ticks": dead.start_ticks + 1})
    first = "the driver with token 1 began"
    assert list_tellings(dead) == ["the driver with token 1 is gone", first]
    new = "the driver with token 2 began, and has sealed no checkpoint yet"
    assert list_tellings(dead) == [new, "the driver with token 2 is gone", first]
    new = new.replace("2", "3")
    assert list_tellings(ProcessIdentity.this_process()) == [new, first]


def test_only_a_change_of_the_verdict_is_an_event() -> None:
    """Of five runs the first and the two changes are listed, oldest first."""
    verdicts = ("pass", "pass", "fail", "fail", "pass")
    runs = [
        {"at": f"2026-01-01T00:0{minute}:00Z", "verdict": verdict}
        for minute, verdict in enumerate(verdicts)
    ]
    found = list(list_verdict_events(runs[::-1]))
    assert [event["says"].rpartition(" ")[2] for event in found] == ["pass", "fail", "pass"]
    assert found[1]["at"] - found[0]["at"] == 120_000
