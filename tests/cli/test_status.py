from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.cli.conftest import SEALED, Cli, seal
from tests.manual_clock import ManualClock, set_desired_at

from tidegate.checkpoints.checkpoint_specs import write_spec
from tidegate.checkpoints.deployed_specs import Deploy, confirm_deploy
from tidegate.checkpoints.driver_reports import DriverStatus, write_status
from tidegate.checkpoints.driver_requests import (
    DesiredState,
    list_pending_requests,
    read_desired_state,
)
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.driver.landing_log import LandingLog
from tidegate.jobs.sinks.lineage_position import PublishedCut, advance_published_cut
from tidegate.jobs.spec.loader import load_spec
from tidegate.jobs.spec.pipeline import PipelineSpec


def say(log: SlotLog, lease: Lease, state: str, *, ago: float = 0.0, **body: object) -> None:
    """The driver's own word."""
    at = SYSTEM_CLOCK.wall_ticks() - int(ago * 1_000_000)
    write_status(
        log.store,
        "flights",
        DriverStatus(
            token=lease.token, driver="d", step="move", at=at, body={"state": state, **body}
        ),
    )


def test_the_commit_of_the_deployed_spec_is_shown(cli: Cli, log: SlotLog) -> None:
    """With who deployed it; nothing before the first driver has had its first round."""
    assert cli("status", "flights", "--json").data["deployed"] is None
    deploy = Deploy(digest="d", who="ann", why="release 7", at=5, commit="12ab34cd56ef")
    confirm_deploy(log.store, "flights", deploy)
    assert cli("status", "flights", "--json").data["deployed"] == {
        "who": "ann",
        "why": "release 7",
        "at": 5,
        "commit": "12ab34cd56ef",
    }
    assert ", commit 12ab34cd56ef" in " ".join(cli("status", "flights").out.split())


def test_stopped_pipeline_shows_its_position(cli: Cli, log: SlotLog) -> None:
    """Without a driver, the status still shows everything that was sealed."""
    data = cli("status", "flights", "--json").data
    assert (data["state"], data["driver"], data["frontier"], data["unpublished"]) == (
        "stopped",
        None,
        3_000_000,
        3,
    )
    assert data["sources"]["EWR"].pop("counts")["late_rows"] == 3
    assert data["sources"]["EWR"] == {
        "frontier": 3_000_000,
        "status": "active",
        "rows": {"read": 30, "released": 27, "late": 3},
        "pending": False,
    }
    assert data["holder"]["why"] == "no data"
    assert data["store"]["url"] == log.store.url


@pytest.mark.parametrize("arguments", [["flights"], ["flights", "--json"], [], ["--json"]])
def test_status_writes_nothing(
    cli: Cli, log: SlotLog, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at a pipeline is safe for its bucket, and needs no right to write."""
    writes: list[str] = []
    for verb in ("create", "compare_and_swap", "put", "delete", "upload"):
        monkeypatch.setattr(LocalStore, verb, lambda store, key, *_, verb=verb: writes.append(verb))
    cli("status", *arguments)
    assert writes == []


def test_words_name_holder_and_rows(cli: Cli, log: SlotLog) -> None:
    """People read who holds the frontier back, since when and why, and the row equation."""
    out = cli("status", "flights").out
    assert "EWR/0 since 2025-06-15T15:06:40Z: no data" in out
    assert "30 read = 27 released + 3 late" in out


def test_dropped_rows_are_shown_with_output_and_reason(cli: Cli, log: SlotLog) -> None:
    """They are in no table, and a failed check of them leads here."""
    seal(log, counts={"dropped:w": 7, "dropped:w:max_jump": 5})
    out = " ".join(cli("status", "flights").out.split())
    assert "dropped: 2 for w (late_window), 5 for w (max_jump)" in out
    missed = cli("status", "flights", "--json").data["sources"]["EWR"]["counts"]["missed"]
    assert {"output": "w", "disposition": "dropped", "reason": "max_jump", "rows": 5} in missed


@pytest.mark.parametrize(
    "why", ["no data", "idle timer running", "open barrier", "no punctuation", "buffered rows"]
)
def test_each_reason_is_reported(cli: Cli, log: SlotLog, why: str) -> None:
    """Why the frontier is held, in words and for machines; since when, and by whom."""
    seal(log, why=why)
    assert f"EWR/0 since 2025-06-15T15:06:40Z: {why}" in cli("status", "flights").out
    assert cli("status", "flights", "--json").data["holder"] == {
        "member": "EWR/0",
        "since": 1_750_000_000_000_000,
        "why": why,
    }


def test_a_timer_stands_still_without_a_driver(cli: Cli, log: SlotLog) -> None:
    """Timers run on the pipeline clock, which only a driver moves."""
    seal(log, why="idle timer running")
    stopped = " ".join(cli("status", "flights").out.split())
    assert "idle timer running when a driver runs, and standing still now" in stopped
    say(log, Lease.acquire(log.store, "flights", ProcessIdentity.this_process()), "running")
    assert "standing still" not in cli("status", "flights").out


@pytest.mark.parametrize(("ago", "state"), [(0.0, "running"), (60.0, "silent")])
def test_running_driver_has_to_speak(cli: Cli, log: SlotLog, ago: float, state: str) -> None:
    """A held lease with a fresh status is running; an old status is silence."""
    lease = Lease.acquire(log.store, "flights", ProcessIdentity.this_process())
    say(log, lease, "running", ago=ago)
    data = cli("status", "flights", "--json").data
    assert (data["state"], data["driver"]["step"]) == (state, "move")


def test_silent_sources_are_named(cli: Cli, log: SlotLog) -> None:
    """As the driver says it, for people and for machines."""
    lease = Lease.acquire(log.store, "flights", ProcessIdentity.this_process())
    say(log, lease, "running", silent={"LGA": 4_000_000_000})
    assert "LGA for 4,000 s" in cli("status", "flights").out
    assert cli("status", "flights", "--json").data["silent"] == {"LGA": 4000}


def test_what_waits_is_reported(cli: Cli, log: SlotLog) -> None:
    """Messages by source and partition, and objects that came behind a greater name."""
    lease = Lease.acquire(log.store, "flights", ProcessIdentity.this_process())
    lag = {"web/0": 1200, "web/1": 34, "app/0": 0}
    say(log, lease, "running", lag=lag, late_uploads={"files": 3})
    out = cli("status", "flights").out
    assert "web by 1,234 messages" in out
    assert "files 3" in out
    assert "app" not in out
    data = cli("status", "flights", "--json").data
    assert (data["lag"], data["late_uploads"]) == (lag, {"files": 3})


BARRIERS = {
    "clock": 100_000_000,
    "barriers": {
        "open": [
            {"id": 7, "opened": 88_000_000, "arrivals": {"EWR/0": {"at": 1}}},
            {"id": 8, "opened": 99_000_000, "arrivals": {"JFK/0": {"at": 1}}},
        ],
        "last_closed": 90_000_000,
    },
}


def test_open_barriers_are_shown_with_id_age_and_who_is_missing(cli: Cli, log: SlotLog) -> None:
    """`tidegate abort-barrier` needs the id; an idle member is not waited for."""
    statuses = {"EWR/0": "active", "JFK/0": "active", "LGA/0": "idle"}
    manifest = seal(log, decider=BARRIERS, statuses=statuses)
    assert manifest.open_barriers[0].arrived == ("EWR/0",)
    assert cli("status", "flights", "--json").data["open_barriers"][0] == (
        {"id": 7, "age": 12_000_000, "left": None, "arrived": ["EWR/0"], "awaited": ["JFK/0"]}
    )
    words = cli("status", "flights").out.split()
    assert words[words.index("7") :][:5] == ["7", "12", "s", "EWR/0", "JFK/0"]


def test_the_oldest_open_barrier_has_its_time_left(cli: Cli, log: SlotLog) -> None:
    """By the timeout of the spec that sealed; the next one waits until the first has closed."""
    source = {"path": "in/", "schema": {"at": "timestamp", "kind": "string"}, "event_time": "at"}
    marks = {"barriers": {"kind": "kind", "types": ["day"]}, "lag": "1m"}
    barriers = {"timeout": "30s", "identity": "ordinal"}
    raw = {"name": "flights", "sources": {"EWR": {**source, **marks}}, "barriers": barriers}
    spec = PipelineSpec.model_validate(raw)
    write_spec(log.store, spec)
    seal(log, decider=BARRIERS, spec_digest=spec.digest())
    first, second = cli("status", "flights", "--json").data["open_barriers"]
    # It is 10 s after the last barrier closed, so that 20 of its 30 s are left.
    assert (first["left"], second["left"]) == (20_000_000, None)
    words = cli("status", "flights").out.split()
    assert words[words.index("7") :][:5] == ["7", "12", "s", "20", "s"]
    Lease.acquire(log.store, "flights", ProcessIdentity.this_process())
    first, _ = cli("status", "flights", "--json").data["open_barriers"]
    # A driver runs, so the clock goes on; the checkpoint is old.
    assert first["left"] == 0
    assert first["age"] > 12_000_000


def test_a_dead_driver_moves_no_clock(cli: Cli, log: SlotLog) -> None:
    """An open barrier is then as old as its checkpoint says, as without a driver."""
    seal(log, decider=BARRIERS)
    dead = ProcessIdentity.this_process().model_copy(update={"start_ticks": 1})
    Lease.acquire(log.store, "flights", dead)
    assert cli("status", "flights", "--json").data["open_barriers"][0]["age"] == 12_000_000


def test_tables_of_an_older_timeline_have_no_number_of_epochs(cli: Cli, log: SlotLog) -> None:
    """Until a publisher follows a restore, `unpublished` is null."""
    advance_published_cut(log.store, "flights", PublishedCut(uid="u", timeline=0, upto=3))
    assert cli("checkpoints", "restore", "flights", "t0-000001", "--yes").exit_code == 0
    assert cli("status", "flights", "--json").data["unpublished"] is None
    assert cli("status", "--json").data["pipelines"][0]["unpublished"] is None
    assert "the tables still have to follow a restore" in cli("status", "flights").out


def test_members_held_back_are_named(cli: Cli, log: SlotLog) -> None:
    """Otherwise no one knows why a source with rows is not read."""
    lease = Lease.acquire(log.store, "flights", ProcessIdentity.this_process())
    say(log, lease, "running", held_back=["EWR/0"])
    assert "EWR/0 (too far ahead" in " ".join(cli("status", "flights").out.split())
    assert cli("status", "flights", "--json").data["held_back"] == ["EWR/0"]


def test_the_verdict_of_the_quality_checks_has_an_age(cli: Cli, log: SlotLog) -> None:
    """It is stale once epochs were sealed for three intervals after it."""
    assert cli("status", "flights", "--json").data["quality"] is None
    sealed = datetime.fromtimestamp(SEALED / 1e6, UTC)
    for before, stale in ((timedelta(minutes=20), False), (timedelta(minutes=40), True)):
        seal(log)
        at = (sealed - before).isoformat()
        result = {"at": at, "verdict": "pass", "checkpoint": "t0-000001-aaaaaa"}
        log.store.put("flights/quality/results/latest.json", json.dumps(result).encode())
        found = cli("status", "flights", "--json").data["quality"]
        assert (found["verdict"], found["stale"]) == ("pass", stale)
        assert found["age_seconds"] > before.total_seconds()
        shown = " ".join(cli("status", "flights").out.split())
        assert "quality: pass, " in shown
        assert ("(stale: " in shown) is stale


def test_a_far_future_stamp_is_a_warning(cli: Cli, log: SlotLog) -> None:
    """Every later row of the member is late, and no row count is wrong."""
    day = 24 * 3_600_000_000
    for ahead, warned in ((day, 0), (day + 1, 1)):
        seal(log, decider={"members": {"EWR/0": {"seen": SEALED + ahead}, "LGA/0": {"seen": None}}})
        warnings = cli("status", "flights", "--json").data["warnings"]
        assert len(warnings) == warned
    assert warnings[0].startswith("EWR/0 has shown a row of 2025-06-16T15:06:40.000001Z, far ahead")
    assert "EWR/0 has shown a row of" in " ".join(cli("status", "flights").out.split())


def test_many_partitions_are_a_warning(cli: Cli, log: SlotLog) -> None:
    """Dated folders stay members for good: each costs a request and some bytes in each epoch."""
    for count, warned in ((200, 0), (201, 1)):
        seal(log, cut={f"EWR/{number:03d}": {} for number in range(count)})
        assert len(cli("status", "flights", "--json").data["warnings"]) == warned


def test_dead_driver_is_lost(cli: Cli, log: SlotLog) -> None:
    """A holder that is proven dead did not end, it was lost."""
    dead = ProcessIdentity.this_process().model_copy(update={"start_ticks": 1})
    say(log, Lease.acquire(log.store, "flights", dead), "running")
    assert cli("status", "flights", "--json").data["state"] == "lost"


def test_foreign_words_are_ignored(cli: Cli, log: SlotLog) -> None:
    """A status with another token than the lease's is someone's last words."""
    first = Lease.acquire(log.store, "flights", ProcessIdentity.this_process())
    say(log, first, "running")
    first.release()
    second = Lease.acquire(log.store, "flights", ProcessIdentity.this_process())
    assert second.token > first.token
    assert cli("status", "flights", "--json").data["state"] == "starting"


def test_failure_is_reported(cli: Cli, log: SlotLog) -> None:
    """How a driver ended, and why, outlives it."""
    lease = Lease.acquire(log.store, "flights", ProcessIdentity.this_process())
    error = {"class": "poison", "message": "row 7 has no time", "code": "x"}
    say(log, lease, "failed", error=error)
    lease.release()
    out = cli("status", "flights").out
    assert "failed" in out
    assert "poison: row 7 has no time" in out


def test_all_pipelines_and_none(cli: Cli, store: LocalStore) -> None:
    """An empty store is said to be empty; folders of strangers are no pipelines."""
    assert "no pipeline ran" in cli("status").out
    store.put("inbox/EWR/0.parquet", b"")
    assert cli("status", "--json").data["pipelines"] == []


def test_all_pipelines_in_one_table(cli: Cli, log: SlotLog) -> None:
    """One line per pipeline."""
    assert "flights" in cli("status").out
    assert [p["pipeline"] for p in cli("status", "--json").data["pipelines"]] == ["flights"]


def test_stop_of_a_stopped_pipeline_is_kept(cli: Cli, log: SlotLog) -> None:
    """Stopping what does not run still says that it should not."""
    said = cli("stop", "flights", "--why", "holiday")
    assert (said.exit_code, "does not run" in said.out) == (0, True)
    assert read_desired_state(log.store, "flights").why == "holiday"


def test_stop_is_refused_during_a_restore_which_would_start_the_stream(
    cli: Cli, log: SlotLog
) -> None:
    """A restore that was abandoned hinders no stop."""
    clock = ManualClock(wall_ticks=SYSTEM_CLOCK.wall_ticks())
    set_desired_at(clock, log.store, "flights", DesiredState.RECOVERING, who="ann")
    said = cli("stop", "flights")
    assert (said.exit_code, "ann restores flights" in said.err) == (2, True)
    assert read_desired_state(log.store, "flights").state is DesiredState.RECOVERING
    clock = ManualClock(wall_ticks=SYSTEM_CLOCK.wall_ticks() - 3_600_000_000)
    set_desired_at(clock, log.store, "flights", DesiredState.RECOVERING, who="bob")
    assert cli("stop", "flights").exit_code == 0
    assert read_desired_state(log.store, "flights").state is DesiredState.STOPPED


def test_stop_asks_this_driver_and_waits(cli: Cli, log: SlotLog) -> None:
    """The request names the driver's token.

    One that does not end in time is a transient failure, and the wish stays.
    """
    lease = Lease.acquire(log.store, "flights", ProcessIdentity.this_process())
    said = cli("stop", "flights", "--wait", "0")
    assert (said.exit_code, "has not ended" in said.err) == (3, True)
    (request,) = list_pending_requests(log.store, "flights")
    assert (request.kind, request.token) == ("drain", lease.token)


def test_a_paused_reducer_is_named_with_the_row_and_the_reason(cli: Cli, log: SlotLog) -> None:
    """The status says why a stream does not advance, without its manifests."""
    failure = {"position": 7, "id": "EWR/0/7", "error": "ValueError: cannot take 2"}
    known = {
        "cursor": 7,
        "head": 0,
        "since": "0-000001",
        "round": 1,
        "status": "paused",
        "failure": failure,
    }
    head = log.head()
    assert head.record is not None
    place = {
        "slot": head.next_slot,
        "attempt": "ab" * 6,
        "parent": str(head.checkpoint),
        "parent_sha256": head.sha256,
    }
    log.seal(
        head.record.model_copy(
            update={**place, "notes": {"streams": {"attachments": {"totals": known}}}}
        )
    )
    out = cli("status", "flights").out
    assert "totals" in out
    assert "EWR/0/7 (row 7): ValueError: cannot take 2" in out
    said = " ".join(out.split())
    assert "restart the driver, which keeps the code it has loaded" in said
    assert "and then: tidegate resume flights totals" in said


def test_sinks_that_are_behind_are_named(cli: Cli, log: SlotLog) -> None:
    """If there are sinks besides the tables, the status names each of them."""
    lease = Lease.acquire(log.store, "flights", ProcessIdentity.this_process())
    say(log, lease, "running", sinks={"iceberg": 0, "warehouse": 7})
    assert "iceberg up to date, warehouse 7 behind" in cli("status", "flights").out


LANDED = """\
apiVersion: tidegate/v1
name: flights
sources:
  EWR:
    path: inbox/EWR
    schema: {sched: timestamp, carrier: string}
    event_time: sched
    lag: 1h
    landing: {format: rate}
"""


@pytest.mark.parametrize(
    ("word", "ago", "state"),
    [("running", 5.0, "running"), ("running", 60.0, "silent"), ("failed", 60.0, "failed")],
)
def test_landings_are_reported(
    cli: Cli,
    log: SlotLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    word: str,
    ago: float,
    state: str,
) -> None:
    """Who lands a source, what came last, and whether the process that should be running was heard
    of.
    """
    (tmp_path / "flights.yaml").write_text(LANDED)
    source = load_spec(tmp_path / "flights.yaml").sources["EWR"]
    assert cli("status", "flights.yaml", "--json").data["landings"] == {
        "EWR": {"state": "never ran", "why": None}
    }
    now = SYSTEM_CLOCK.wall_ticks()
    with monkeypatch.context() as patch:
        patch.setattr(SYSTEM_CLOCK, "wall_ticks", lambda: now - int(ago * 1_000_000))
        landing = LandingLog("EWR", source, log.store, tmp_path / "checkpoint")
        landing.land_batch(7, b"x", 1_200)
        landing.report_status(word, "a value" if word == "failed" else None)
    found = cli("status", "flights.yaml", "--json").data["landings"]["EWR"]
    assert (found["state"], found["batch"], found["rows"]) == (state, 7, 1_200)
    out = cli("status", "flights.yaml").out
    assert "7 (1,200 rows)" in out
    assert ("is its process running?" in " ".join(out.split())) == (state == "silent")
