"""What the driver does for the bucket beside its epochs."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from structlog.testing import capture_logs

from tests.checkpoints.conftest import Author
from tests.manual_clock import ManualClock
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.errors import STORE_UNAVAILABLE
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.retention import Retention
from tidegate.checkpoints.slot_index import SlotIndex
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.verify import (
    SCRUB_EVERY,
    CheckpointVerdict,
    ObjectProblem,
    Verification,
    VerificationFinding,
    is_scrub_due,
)
from tidegate.jobs.driver import housekeeping
from tidegate.jobs.driver.housekeeping import Housekeeper
from tidegate.jobs.spec.pipeline import PipelineSpec

SPEC = PipelineSpec.model_validate(
    {
        "name": "p",
        "sources": {
            "a": {"path": "in/", "schema": {"t": "timestamp"}, "event_time": "t", "lag": "1s"}
        },
        "checkpoint": {"maintain_every": "10m"},
    }
)


@pytest.fixture
def log() -> SlotLog:
    return SlotLog(MemoryStore(), "p", clock=ManualClock())


def test_the_index_is_filled_up_when_many_slots_are_new(
    log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not each time: pages are rewritten whole."""
    monkeypatch.setattr(housekeeping, "_INDEX_AFTER", 3)
    keeper = Housekeeper(SPEC, log)
    with patch.object(SlotIndex, "refresh") as refresh:
        for sealed, refreshed in ((2, 0), (1, 1), (2, 1), (1, 2)):
            for _ in range(sealed):
                Author().seal(log)
            keeper.run_round()
            assert refresh.call_count == refreshed


def test_retention_runs_as_often_as_the_spec_says(log: SlotLog) -> None:
    """Never at the start of a driver, which has better things to do; `never` is never."""
    now = [0.0]
    keepers = [Housekeeper(spec, log, lambda: now[0]) for spec in (SPEC, _never())]
    with patch.object(Retention, "run") as run:
        for minute in range(0, 25, 5):
            now[0] = 60.0 * minute
            for keeper in keepers:
                keeper.run_round()
    assert run.call_count == 2


def test_without_airflow_the_driver_scrubs_once_a_day(log: SlotLog) -> None:
    """In pieces, so that nothing else waits for it; a damaged checkpoint is condemned."""
    author, now = Author(), [0.0]
    manifests = author.extend(log, 4, with_files=True)
    log.store.delete(manifests[1].files["events"][0].key)
    log.store.delete(log.layout.index_page_key("scrubbed"))
    keeper = Housekeeper(_never(), log, lambda: now[0])
    keeper.run_round()
    assert is_scrub_due(log, SYSTEM_CLOCK.wall_ticks())  # not at the start of a driver
    now[0] = 3600.0
    with patch.object(housekeeping, "_SCRUB_SECONDS", 0.0):
        for _ in manifests:
            keeper.run_round()
    keeper.run_round()
    assert set(RootsFile(log.store, "p").read().condemned) == {str(manifests[1].id)}
    assert not is_scrub_due(log, SYSTEM_CLOCK.wall_ticks())
    assert is_scrub_due(log, SYSTEM_CLOCK.wall_ticks() + SCRUB_EVERY)


def test_the_log_names_the_evidence_against_a_checkpoint(log: SlotLog) -> None:
    """Not an object for which the store gave no answer."""
    manifest, now = Author().seal(log), [0.0]
    findings = [
        VerificationFinding(key=key, problem=problem, detail="")
        for key, problem in (("a", ObjectProblem.UNKNOWN), ("b", ObjectProblem.MISSING))
    ]
    damaged = Verification(
        checkpoint=str(manifest.id),
        verdict=CheckpointVerdict.DAMAGED,
        findings=tuple(findings),
        objects=2,
        bytes=0,
        checksums=True,
        deep=False,
    )
    keeper = Housekeeper(_never(), log, lambda: now[0])
    now[0] = 3600.0
    with (
        patch.object(housekeeping, "scrub_checkpoints", return_value=iter([damaged])),
        capture_logs() as logged,
    ):
        keeper.run_round()
    assert [(line["problem"], line["key"]) for line in logged] == [("missing", "b")]


def test_a_store_that_is_away_is_only_logged(log: SlotLog) -> None:
    """The next round tries again."""
    keeper = Housekeeper(SPEC, log)
    with patch.object(
        SlotLog, "head", side_effect=STORE_UNAVAILABLE(uri="memory://", cause="away")
    ):
        keeper.run_round()


def _never() -> PipelineSpec:
    raw = SPEC.model_dump(mode="json", by_alias=True)
    return PipelineSpec.model_validate(raw | {"checkpoint": {"maintain_every": "never"}})
