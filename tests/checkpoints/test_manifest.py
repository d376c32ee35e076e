"""Records in slots: canonical bytes, format versions, the golden manifest, ids and keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.servers.memory_store import Fault, MemoryStore

from tidegate.checkpoints.bucket_layout import BucketLayout, CheckpointId, generate_attempt_id
from tidegate.checkpoints.canonical_json import (
    canonical_bytes,
    parse_json,
    sha256_of_bytes,
    sha256_of_file,
)
from tidegate.checkpoints.manifest import (
    AttemptLifecycle,
    CheckpointState,
    Counters,
    ForkRecord,
    Manifest,
    OpenBarrierState,
    RetiredEpoch,
    parse_record,
)
from tidegate.checkpoints.pipeline_identity import ensure_identity, read_identity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.time_units import TICK_MIN

if TYPE_CHECKING:
    from tests.checkpoints.conftest import Author

GOLDEN = Path(__file__).parent / "golden"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("manifest-v1", Manifest),
        ("manifest-v2", Manifest),
        ("fork-v1", ForkRecord),
        ("fork-v3", ForkRecord),
        ("stub-v1", RetiredEpoch),
    ],
)
def test_golden_records_stay_readable(name: str, kind: type) -> None:
    """Yesterday's bytes are read by today's code and written back byte for byte."""
    data = (GOLDEN / f"{name}.json").read_bytes()
    record = parse_record(data)
    assert isinstance(record, kind)
    assert record.to_bytes() == data


def test_the_golden_manifest_keeps_its_hash() -> None:
    """The chain hash of the golden bytes is pinned: a change of the writer shows here."""
    assert (
        sha256_of_file(GOLDEN / "manifest-v1.json")
        == (GOLDEN / "manifest-v1.sha256").read_text().strip()
    )


def test_a_newer_format_is_refused_with_advice() -> None:
    """A record of a later version names both versions and says what to do."""
    data = json.loads((GOLDEN / "manifest-v1.json").read_bytes()) | {
        "format_version": 4,
        "shiny": True,
    }
    with pytest.raises(ConfigurationError, match=r"format 4.*reads up to 3") as caught:
        parse_record(json.dumps(data).encode())
    assert caught.value.advice is not None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"format_version":1,"kind":"?"}',
        b'{"format_version":1,"kind":"epoch"}',
    ],
)
def test_garbage_in_a_slot_is_named_as_such(data: bytes) -> None:
    """Bytes that are no record raise an error that names the place."""
    with pytest.raises(PoisonError, match="slot 7"):
        parse_record(data, "slot 7")


def test_an_unknown_field_is_refused() -> None:
    """A field of the same version that no one knows is not dropped silently."""
    data = json.loads((GOLDEN / "manifest-v1.json").read_bytes()) | {"surprise": 1}
    with pytest.raises(PoisonError, match="surprise"):
        parse_record(json.dumps(data).encode())


@pytest.mark.parametrize("value", ["7", 7.0, True, None])
def test_a_number_of_another_type_is_refused(value: object) -> None:
    """Written again, such a record would have other bytes, and the hash of the chain would not fit."""
    data = json.loads((GOLDEN / "manifest-v1.json").read_bytes()) | {"created_at": value}
    with pytest.raises(PoisonError, match=r"1 bad fields, first: \('created_at',\)"):
        parse_record(json.dumps(data).encode())


@settings(deadline=None)  # two busy cores
@given(JSON)
def test_canonical_bytes_are_a_fixed_point(value: object) -> None:
    """Reading and writing again gives the same bytes, whatever the order of keys was."""
    data = canonical_bytes(value)
    assert canonical_bytes(parse_json(data)) == data
    assert sha256_of_bytes(data) == sha256_of_bytes(canonical_bytes(json.loads(json.dumps(value))))


@pytest.mark.parametrize("value", [{1: 2}, {"a": [{None: 1}]}, float("nan"), {"a": float("inf")}])
def test_what_json_would_change_silently_is_refused(value: object) -> None:
    """Keys that are not text, and numbers that are not finite, are errors."""
    with pytest.raises(ValueError, match=r"keys are strings|not JSON compliant|Out of range"):
        canonical_bytes(value)


@settings(deadline=None)  # two busy cores
@given(st.integers(0, 99), st.integers(1, 10**8), st.from_regex(r"[0-9a-f]{6,32}", fullmatch=True))
def test_checkpoint_ids_survive_being_written(timeline: int, slot: int, attempt: str) -> None:
    """Parsing the written form gives the id back; keys of folders do too."""
    checkpoint, layout = CheckpointId(timeline, slot, attempt), BucketLayout("p")
    assert CheckpointId.parse(str(checkpoint)) == checkpoint
    assert layout.parse_attempt(layout.state_prefix(checkpoint) + "x.parquet") == checkpoint
    assert (
        layout.parse_attempt(layout.table_prefix("late", checkpoint) + "sub/x.parquet")
        == checkpoint
    )
    assert layout.parse_attempt(layout.slot_key(timeline, slot)) is None


@settings(deadline=None)  # two busy cores
@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_newer_slots_sort_first(one: int, two: int) -> None:
    """Key order is the reverse of slot order."""
    layout = BucketLayout("p")
    assert (layout.slot_key(0, one) < layout.slot_key(0, two)) == (one > two)


def test_ids_and_names_are_checked() -> None:
    """Wrong ids, pipeline names, table names and slots are refused."""
    for text in ("", "t0-1", "latest", "t0-000001-XYZ123", "t0-000001-ab12cd "):
        with pytest.raises(ConfigurationError, match="not a checkpoint id"):
            CheckpointId.parse(text)
    for name in ("", "a/b", "../x", ".hidden"):
        with pytest.raises(ConfigurationError, match="cannot be a pipeline name"):
            BucketLayout(name)
    with pytest.raises(ConfigurationError, match="table name"):
        BucketLayout("p").table_prefix("a/b", CheckpointId(0, 1, generate_attempt_id()))
    with pytest.raises(ValueError, match="slots are"):
        BucketLayout("p").slot_key(0, 0)


def test_the_row_equation() -> None:
    """Every disposition counts once; a missing row shows."""
    counters = Counters(
        read=21,
        released=10,
        late=1,
        dropped={"a": 2, "b": 3},
        rejected=1,
        dead_lettered=1,
        retained=3,
    )
    assert counters.is_conserved()
    assert not counters.model_copy(update={"late": 0}).is_conserved()


def test_nothing_is_counted_before_the_first_row() -> None:
    """A pipeline starts with 0 for every count, and the rows of its first epoch are all it has."""
    counts = Counters().model_dump(exclude={"dropped", "per_source"})
    assert set(counts.values()) == {0}
    assert Counters().accounted_rows() == 0


def test_an_attempt_moves_only_forward() -> None:
    """The lifecycle allows its edges and no other; a sent attempt is aborted only on evidence."""
    attempt = AttemptLifecycle("t0-000001-ab12cd")
    for state in (
        CheckpointState.SNAPSHOT,
        CheckpointState.PERSISTED,
        CheckpointState.ACKNOWLEDGED,
    ):
        attempt.move_to(state)
    for wrong in (CheckpointState.TRIGGERED, CheckpointState.ABORTED):
        with pytest.raises(PoisonError, match="cannot go"):
            attempt.move_to(wrong)
    attempt.move_to(CheckpointState.ABORTED, slot_holds_other=True)
    with pytest.raises(PoisonError, match="cannot go"):
        attempt.move_to(CheckpointState.COMPLETE)


def test_an_attempt_that_was_never_sent_can_be_aborted() -> None:
    """Before the PUT, giving up is a fact."""
    attempt = AttemptLifecycle("t0-000001-ab12cd")
    attempt.move_to(CheckpointState.ABORTED)
    assert attempt.state is CheckpointState.ABORTED


@pytest.mark.parametrize("fault", [None, Fault.LOST_ANSWER, Fault.NO_EFFECT, Fault.LATE])
def test_all_first_starters_get_one_identity(fault: Fault | None) -> None:
    """Whatever happens to the first create, everyone ends with the uid that lies in the bucket."""
    faults = [fault]
    store = MemoryStore(
        hook=lambda request: faults.pop() if faults and request.verb == "create" else None
    )
    assert read_identity(store, "p") is None
    one, two = ensure_identity(store, "p"), ensure_identity(store, "p")
    assert one == two == read_identity(store, "p")


@pytest.mark.parametrize(
    ("last_closed", "deadline"), [(None, 1_000_000), (70, 1_000_000), (90, 1_000_010)]
)
def test_a_barrier_has_its_deadline_on_the_wall_clock(
    author: Author, log: SlotLog, last_closed: int | None, deadline: int
) -> None:
    """It is the timeout after its first arrival, or after the barrier before it closed.

    Only the oldest has one: the barriers that were opened behind it wait for their turn.
    """
    opened = [{"id": number, "opened": at, "arrivals": {}} for number, at in ((2, 80), (3, 95))]
    barriers = {"open": opened, "last_closed": last_closed}
    manifest = author.manifest(
        log.head(), created_at=1_000_001, decider={"clock": 101, "barriers": barriers}
    )
    assert manifest.find_barrier_deadline(None) is None
    assert manifest.find_barrier_deadline(20) == deadline


def test_without_an_open_barrier_there_is_no_deadline(author: Author, log: SlotLog) -> None:
    """Neither a pipeline without barriers nor one whose barriers all closed waits for one."""
    for barriers in (None, {"open": [], "last_closed": 70}):
        manifest = author.manifest(log.head(), decider={"clock": 101, "barriers": barriers})
        assert manifest.find_barrier_deadline(20) is None
        assert manifest.open_barriers == []


def test_an_open_barrier_tells_its_age_and_who_is_missing(author: Author, log: SlotLog) -> None:
    """The age is that of the pipeline's clock; members that are idle or done are not awaited."""
    opened = {"id": 7, "opened": 80, "arrivals": {"b/0": {}, "a/0": {}}}
    statuses = {"d/0": "active", "c/0": "active", "a/0": "active", "e/0": "idle", "f/0": "done"}
    manifest = author.manifest(
        log.head(),
        decider={"clock": 101, "barriers": {"open": [opened]}},
        decision={"statuses": statuses, "blocked": ["a/0", "b/0"]},
    )
    assert manifest.open_barriers == [
        OpenBarrierState(id=7, age=21, arrived=("a/0", "b/0"), awaited=("c/0", "d/0"))
    ]
    assert manifest.blocked_members == ["a/0", "b/0"]


def test_the_newest_event_times_are_those_that_were_seen(author: Author, log: SlotLog) -> None:
    """A member that has shown no event time yet is left out; time 0 is a time."""
    members = {"a/0": {"seen": 0}, "b/0": {"seen": None}, "b/1": {"seen": 9}}
    manifest = author.manifest(log.head(), decider={"members": members})
    assert manifest.newest_times == {"a/0": 0, "b/1": 9}


def test_each_source_tells_when_its_oldest_object_arrived(author: Author, log: SlotLog) -> None:
    """The earliest arrival of all its members counts; those without objects tell nothing."""
    cut = {"a/0": {"arrived": 7}, "a/1": {"arrived": 5}, "a/2": {}, "b/0": {"arrived": 6}}
    assert author.manifest(log.head(), cut=cut).find_oldest_arrivals() == {"a": 5, "b": 6}


def test_the_state_of_streams_and_the_section_are_read_back(author: Author, log: SlotLog) -> None:
    """The next epoch goes on with what the writer of this one noted."""
    manifest = author.manifest(
        log.head(), notes={"streams": {"asked": [["pause", "x"]]}}, decision={"section": 3}
    )
    assert manifest.stream_state == {"asked": [["pause", "x"]]}
    assert manifest.section == 3


def test_an_epoch_without_a_decision_reads_as_nothing_yet(author: Author, log: SlotLog) -> None:
    """Batches of jobs and the first epoch have no barriers, times, frontiers and streams."""
    manifest = author.manifest(log.head())
    assert (manifest.open_barriers, manifest.blocked_members) == ([], [])
    assert (manifest.newest_times, manifest.find_oldest_arrivals()) == ({}, {})
    assert (manifest.frontier_before, manifest.frontier_after) == (TICK_MIN, TICK_MIN)
    assert (manifest.release_after, manifest.section) == ((0, TICK_MIN), 0)
    assert (manifest.frontier_holder, manifest.stream_state) == (None, {})


def test_of_several_bad_fields_the_first_is_named() -> None:
    """The error for a damaged record says how many fields are bad and where to look first."""
    data = json.loads((GOLDEN / "manifest-v1.json").read_bytes()) | {"slot": "x", "created_at": "y"}
    with pytest.raises(PoisonError, match=r"2 bad fields, first: \('slot',\)"):
        parse_record(json.dumps(data).encode())
