"""One state for every surface, whatever lies in the bucket."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.checkpoints.conftest import Author
from tests.checkpoints.reporting_driver import bucket
from tests.manual_clock import ManualClock
from tests.servers.memory_store import MemoryStore, StoreRequest

from tidegate.checkpoints.driver_requests import DesiredState, set_desired_state
from tidegate.checkpoints.lease import LeaseObserver
from tidegate.checkpoints.pipeline_overview import PipelineState, read_overview
from tidegate.checkpoints.slot_log import SlotLog


@pytest.mark.parametrize(
    ("lease", "reported", "desired", "state"),
    [
        ("none", None, None, "new"),
        ("none", None, "run", "lost"),
        ("none", None, "stopped", "stopped"),
        ("held", None, "run", "leased"),
        ("held", "waiting", "run", "waiting"),
        ("held", "failed", "run", "running"),
        ("held", "a state of a newer driver", "run", "running"),
        ("held", "running", "recovering", "recovering"),
        ("dead", "running", "run", "lost"),
        ("dead", "failed", "run", "failed"),
        ("free", "finished", "stopped", "finished"),
        ("free", "stopped", "stopped", "stopped"),
        ("free", "stopped", "run", "lost"),
    ],
)
def test_one_state_of_a_pipeline(
    lease: str, reported: str | None, desired: str | None, state: str
) -> None:
    """It follows from lease, report and what people want."""
    store = bucket(lease, reported)
    if desired:
        set_desired_state(store, "p", DesiredState(desired), who="ann")
    assert read_overview(SlotLog(store, "p")).state == state


def test_an_old_report_is_silence_only_without_an_observer() -> None:
    """An observer times the lease on its own clock, so it does not compare those of two hosts."""
    log, clock = SlotLog(bucket("held", "running", ago=60), "p"), ManualClock()
    assert read_overview(log).state is PipelineState.SILENT
    observer = LeaseObserver(log.store, "p", clock)
    assert read_overview(log, observer).state is PipelineState.RUNNING
    clock.advance(10)
    assert read_overview(log, observer).driver.state is PipelineState.LOST


def test_an_overview_is_five_requests() -> None:
    """So that lists of many pipelines stay cheap."""
    requests: list[StoreRequest] = []
    store = MemoryStore(bucket("held", "running").bucket, hook=requests.append)
    read_overview(SlotLog(store, "p"))
    assert len(requests) <= 5


def test_surfaces_keep_their_words() -> None:
    """Scripts and live databases have them."""
    words = {
        state: [state.word_for(on) for on in ("cli", "page", "event")] for state in PipelineState
    }
    different = {state: each for state, each in words.items() if set(each) != {state.value}}
    assert different == {
        "new": ["never ran", "new", "new"],
        "leased": ["starting", "running", "leased"],
        "running": ["running", "running", "live"],
        "lost": ["lost", "down", "lost"],
    }


@pytest.mark.parametrize(("folders", "warned"), [(200, False), (201, True)])
def test_many_folders_of_a_source_are_a_warning(
    log: SlotLog, author: Author, folders: int, warned: bool
) -> None:
    """Each stays in every manifest, also after it is gone; the advice says what to do instead."""
    part = {"parts": [], "pending": False}
    cut = {f"orders/{day}": part for day in range(folders)} | {"users": part}
    log.seal(author.manifest(log.head(), cut=cut))
    warnings = read_overview(log).warnings
    assert [w for w in warnings if w.startswith("orders has") and "by: source" in w] == (
        warnings if warned else []
    )
    assert len(warnings) == warned


def test_members_with_one_trouble_are_one_warning(log: SlotLog, author: Author) -> None:
    """The worst are named, and how many more there are."""
    now, day = author.manifest(log.head()).recorded_now, 24 * 3_600_000_000
    seen = {f"web/{n}": {"seen": now + (n + 2) * day} for n in range(5)}
    part = {"parts": [], "pending": False}
    cut = {f"{name}/{n}": part for name in ("a", "b") for n in range(201)}
    log.seal(author.manifest(log.head(), cut=cut, decider={"members": seen}))
    ahead, many = read_overview(log).warnings
    assert ahead.startswith("web/4, web/3, web/2 and 2 more have shown rows of up to ")
    assert many.startswith("a, b have up to 201 partitions: ")


@pytest.mark.parametrize(("age", "state"), [(2.0, "running"), (60.0, "silent")])
def test_the_age_of_a_report_is_that_of_the_store(
    monkeypatch: pytest.MonkeyPatch, age: float, state: str
) -> None:
    """The clocks of two hosts may differ by hours; the store's own clock says how old it is."""
    store = bucket("held", "running", ago=3600.0 if age < 15 else -3600.0)
    read = store.get
    monkeypatch.setattr(store, "get", lambda key: replace(read(key), age=age))
    assert read_overview(SlotLog(store, "p")).state.value == state
