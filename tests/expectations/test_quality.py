"""From a bucket to the result in it: gathering, the whole run, the command."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.cli.conftest import Cli, refuse_undocumented
from tests.cli.conftest import cli as cli
from tests.epochs import retire_epoch
from tests.expectations.conftest import START, changed, manifest
from tests.expectations.evidence_reading import gather_evidence
from tests.manual_clock import ManualClock
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.driver_requests import DesiredState, set_desired_state
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.expectations import quality_run, summaries
from tidegate.expectations.evidence import Evidence
from tidegate.expectations.quality_run import TableReader
from tidegate.jobs.spec.pipeline import PipelineSpec

SPEC = """\
apiVersion: tidegate/v1
name: flights
sources:
  EWR: &s {path: inbox/EWR, schema: {sched: timestamp, carrier: string}, event_time: sched, lag: 1h}
  JFK: {<<: *s, path: inbox/JFK}
"""


def fill(store: Store, slots: int = 3, *, pending: bool = False) -> None:
    """Seal epochs whose counters agree with the healthy tables."""
    log = SlotLog(store, "flights")
    for slot in range(1, slots + 1):
        head = log.head()
        parent = str(head.checkpoint) if head.checkpoint else None
        sealed = manifest(slot, pending=pending).model_copy(
            update={"parent": parent, "parent_sha256": head.sha256}
        )
        log.seal(sealed)


def reader(evidence: Evidence) -> TableReader:
    """Reads the tables of the evidence."""

    def read(name: str, *, since: int = 0, whole: bool = False) -> pa.Table:
        table: pa.Table = getattr(evidence, name)
        return table.filter(pc.greater(table["_epoch"], since))

    return read


@pytest.fixture
def read(healthy: Evidence) -> TableReader:
    return reader(healthy)


def test_tables_are_cut_at_the_newest_published_epoch(
    spec: PipelineSpec, healthy: Evidence
) -> None:
    """Rows of an epoch that the checkpoints table does not show yet are left out, and it counts as
    unpublished.
    """
    store = MemoryStore()
    fill(store)
    behind = changed(healthy, checkpoints=healthy.checkpoints.slice(0, 2))
    evidence = gather_evidence(spec, store, reader(behind), clock=ManualClock())
    assert evidence.barriers["_epoch"].to_pylist() == [1, 2]
    assert (evidence.head is not None and evidence.head.slot, evidence.sealed) == (2, 3)


def test_past_is_the_manifest_before_the_recent_ones(spec: PipelineSpec, read: TableReader) -> None:
    """`quality.recent` epochs back, and nothing when there are not that many."""
    store = MemoryStore()
    fill(store)
    recent = PipelineSpec.model_validate(
        spec.model_dump(by_alias=True) | {"quality": {"recent": 2}}
    )
    past = gather_evidence(recent, store, read, clock=ManualClock()).past
    assert past is not None
    assert past.slot == 1
    assert gather_evidence(spec, store, read, clock=ManualClock()).past is None


def test_recent_epochs_can_be_those_of_a_time(spec: PipelineSpec, read: TableReader) -> None:
    """`quality.recent_time`: epochs sealed up to that long ago are the past."""
    store = MemoryStore()
    fill(store)
    now = START + timedelta(minutes=3, seconds=20)  # the epochs are a minute apart
    clock = ManualClock(wall_ticks=int(now.timestamp()) * 10**6)
    timed = PipelineSpec.model_validate(
        spec.model_dump(by_alias=True) | {"quality": {"recent_time": "1m"}}
    )
    evidence = gather_evidence(timed, store, read, clock=clock)
    assert (evidence.recent_since, evidence.past and evidence.past.slot) == (2, 2)


def test_a_retired_beginning_of_recent_epochs_moves_to_what_is_left(
    spec: PipelineSpec, read: TableReader
) -> None:
    """Counts are differences of two manifests; the oldest one that is left takes the place."""
    store = MemoryStore()
    fill(store)
    retire_epoch(SlotLog(store, "flights"), 1)
    recent = PipelineSpec.model_validate(
        spec.model_dump(by_alias=True) | {"quality": {"recent": 2}}
    )
    evidence = gather_evidence(recent, store, read, clock=ManualClock())
    assert (evidence.recent_since, evidence.past and evidence.past.slot) == (2, 2)


@pytest.mark.parametrize(
    ("state", "pending", "wanted"),
    [("run", True, True), ("run", False, False), ("stopped", True, False)],
)
def test_next_checkpoint_is_due_only_with_work_and_will(
    spec: PipelineSpec, read: TableReader, state: str, pending: bool, wanted: bool
) -> None:
    """An idle stream seals nothing, a stopped one neither; neither is behind."""
    store = MemoryStore()
    fill(store, pending=pending)
    set_desired_state(store, "flights", DesiredState(state), who="test")
    assert gather_evidence(spec, store, read, clock=ManualClock()).wanted is wanted


def test_only_recent_events_are_read(spec: PipelineSpec, healthy: Evidence) -> None:
    """A long stream's events are looked at from `release_epochs` back.

    What lies before is not missed.
    """
    store = MemoryStore()
    fill(store)
    epoch = pa.array([1 + n // 40 for n in range(96)], pa.int64())
    grown = changed(healthy, events=healthy.events.set_column(6, "_epoch", epoch))
    short = PipelineSpec.model_validate(
        spec.model_dump(by_alias=True) | {"quality": {"release_epochs": 2}}
    )
    evidence = gather_evidence(short, store, reader(grown), clock=ManualClock())
    assert (evidence.events_since, evidence.events.num_rows) == (1, 56)
    assert summaries.summarize_release(evidence)["positions_missing"].tolist() == [0]


def test_pipeline_that_never_ran_has_evidence(spec: PipelineSpec, healthy: Evidence) -> None:
    """Before the first epoch there is nothing, and no error."""
    evidence = gather_evidence(
        spec,
        MemoryStore(),
        lambda name, *, since=0, whole=False: getattr(healthy, name).slice(0, 0),
        clock=ManualClock(),
    )
    assert (evidence.head, evidence.sealed) == (None, 0)


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")
def test_command_prints_verdict_and_key(
    tmp_path: Path,
    read: TableReader,
    healthy: Evidence,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    """Exit 0 with the key last when all is well.

    Exit 1 naming the critical check; the envelope with --json.
    """
    (tmp_path / "flights.yaml").write_text(SPEC)
    store = LocalStore(tmp_path / "store")
    ensure_identity(store, "flights")
    fill(store)
    monkeypatch.setattr(quality_run, "_make_table_reader", lambda spec, store: read)
    arguments = ["quality", "flights.yaml", "--store", str(tmp_path / "store")]
    said = cli(*arguments)
    assert said.exit_code == 0
    out = said.out.splitlines()
    assert out[0].startswith("flights: pass")
    stored = json.loads(store.get(out[-1]).data)
    assert (stored["verdict"], stored["checkpoint"]) == ("pass", "t0-000003-aaaaaaaaaaaa")
    assert store.stat(stored["docs"]) is not None

    doubled = changed(
        healthy, events=pa.concat_tables([healthy.events, healthy.events.slice(0, 1)])
    )
    monkeypatch.setattr(quality_run, "_make_table_reader", lambda spec, store: reader(doubled))
    said = cli(*arguments, "--json")
    assert said.exit_code == 1
    envelope = json.loads(said.out)
    refuse_undocumented(envelope)
    assert envelope["kind"] == "quality"
    assert [c["id"] for c in envelope["data"]["failed"]] == ["positions_once", "rows_once"]
    assert json.loads(store.get("flights/quality/results/latest.json").data)["verdict"] == "fail"


def test_bad_spec_is_two_and_no_traceback(tmp_path: Path, cli: Cli) -> None:
    """A configuration error goes to standard error in words, with the exit code of its class.

    With --json it is on standard output as well, as for every command.
    """
    (tmp_path / "bad.yaml").write_text("name: flights\nsorces: {}\n")
    arguments = ["quality", str(tmp_path / "bad.yaml"), "--store", str(tmp_path)]
    said = cli(*arguments)
    assert (said.exit_code, "sorces" in said.err, said.out) == (2, True, "")
    said = cli(*arguments, "--json")
    assert said.exit_code == 2
    envelope = json.loads(said.out)
    refuse_undocumented(envelope)
    assert (envelope["kind"], envelope["data"]["class"]) == ("error", "configuration")
