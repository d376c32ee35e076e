"""The slot that completes a barrier is a tagged cut over all tables (semantics.md, section 3.4)."""

from __future__ import annotations

import pytest
from pyiceberg.table import StaticTable
from tests.manual_clock import ManualClock
from tests.sinks.conftest import World, make_spec
from tests.sinks.table_checks import is_table, once

from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.jobs.sinks import table_maintenance
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.lineage_position import read_published_cut
from tidegate.jobs.sinks.published_tables import find_published_slot, have_followers_rewound
from tidegate.jobs.sinks.table_maintenance import (
    compact_tables,
    delete_orphan_files,
    list_referenced_files,
    note_table_versions,
)

TABLES = ("events", "late", "barriers", "dead_letters", "checkpoints")
LATER = 4_000_000_000_000_000  # wall clock: after every file of these tests


class DiedError(BaseException):
    """What a kill -9 looks like to the code: nothing catches it."""


def die() -> None:
    """Be killed."""
    raise DiedError


def tags(world: World) -> dict[str, dict[str, list[int]]]:
    """Tag of a barrier -> table -> the slots of its rows, for readers without a catalog."""
    current = read_published_cut(world.store, "p")
    found: dict[str, dict[str, list[int]]] = {}
    for name, location in (current.tables if current else {}).items():
        table = StaticTable.from_metadata(location)
        for tag, ref in table.metadata.refs.items():
            if tag.startswith("barrier-"):
                slots = table.scan(snapshot_id=ref.snapshot_id).to_arrow()["_epoch"].to_pylist()
                found.setdefault(tag, {})[name] = sorted(set(slots))
    return found


def test_every_table_has_the_tag_of_a_barrier_at_its_slot(world: World) -> None:
    """One call follows many slots; each complete barrier is a cut, an incomplete one is none."""
    world.seal(2, ("events", "late"))
    world.seal(1, barrier=(1, "complete"))
    world.seal(1, barrier=(2, "incomplete"))
    world.seal(1, ("events", "hourly"))
    world.seal(1, (), barrier=(3, "complete"))
    world.seal(1)
    sink = world.sink()
    sink.follow(world.log)
    assert world.exact(sink)
    found = tags(world)
    assert found.keys() == {"barrier-1", "barrier-3"}
    empty: dict[str, list[int]] = {"barriers": [], "dead_letters": []}
    first = {"events": [1, 2, 3], "late": [1, 2], "checkpoints": [1, 2, 3], **empty}
    assert {t: slots for t, slots in found["barrier-1"].items() if t in TABLES} == first
    assert found["barrier-3"]["events"] == [1, 2, 3, 4, 5]
    assert (found["barrier-3"]["hourly"], "hourly" in found["barrier-1"]) == ([5], False)
    assert sink.open_table("events").scan().use_ref("barrier-1").to_arrow().num_rows == 6


def test_the_pointer_moves_when_every_table_has_the_tag(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers meet the cut of the barrier itself, and none on which a tag is missing."""
    seen: list[tuple[int, set[str]]] = []
    original = IcebergSink._publish_cut

    def look(self: IcebergSink, lineage: object) -> None:
        original(self, lineage)  # type: ignore[arg-type]
        seen.append((world.published_slot(), set(tags(world).get("barrier-7", ()))))

    monkeypatch.setattr(IcebergSink, "_publish_cut", look)
    world.seal(2)
    world.seal(1, barrier=(7, "complete"))
    world.seal(2)
    world.sink().follow(world.log)
    assert [slot for slot, _ in seen] == [3, 5, 5]
    assert seen[0][1] >= set(TABLES)


@pytest.mark.parametrize("table", ["events", "late", "checkpoints"])
def test_a_kill_between_tags_leaves_whole_cuts(
    world: World, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """The next publisher tags the tables that lack it, at the same slot."""
    world.seal(1)
    world.sink().follow(world.log)
    world.seal(1, barrier=(1, "complete"))
    with monkeypatch.context() as patch:
        once(patch, "append_slots", is_table(table), die)
        with pytest.raises(DiedError):
            world.sink().follow(world.log)
    assert tags(world) == {}
    world.seal(2)
    sink = world.sink()
    sink.follow(world.log)
    assert world.exact(sink)
    found = tags(world)["barrier-1"]
    assert found["events"] == found["checkpoints"] == [1, 2]
    assert found.keys() >= set(TABLES)


def test_a_restore_across_a_barrier_takes_its_tag_back(world: World) -> None:
    """Earlier tags stay; the barrier that completes again is tagged on the new timeline."""
    sink = world.sink()
    world.seal(1, barrier=(1, "complete"))
    target = world.seal(1).id
    world.seal(1, barrier=(2, "complete"))
    world.seal(1)
    sink.follow(world.log)
    assert tags(world).keys() == {"barrier-1", "barrier-2"}
    world.fork(target)
    sink.follow(world.log)
    assert tags(world).keys() == {"barrier-1"}
    world.seal(2)
    world.seal(1, barrier=(2, "complete"))
    sink.follow(world.log)
    assert tags(world)["barrier-2"]["events"] == [1, 2, 3, 4, 5]
    rows = sink.open_table("events").scan().use_ref("barrier-2").to_arrow()
    assert sorted(set(rows["_timeline"].to_pylist())) == [0, 1]
    assert world.exact(sink)


def test_a_barrier_does_not_wait_for_a_full_group(world: World) -> None:
    """With `publish_every` the barrier's slot ends the group."""
    world.spec = make_spec(outputs={"publish_every": 5})
    sink = world.sink()
    world.seal(2)
    assert sink.follow(world.log, flush=False) == 0
    world.seal(1, barrier=(1, "complete"))
    assert sink.follow(world.log, flush=False) == 3
    world.seal(1)
    assert sink.follow(world.log, flush=False) == 0
    assert tags(world)["barrier-1"]["events"] == [1, 2, 3]


def test_under_pass_a_barrier_is_no_cut(world: World) -> None:
    """Rows behind the barrier have left before it closes."""
    world.spec = make_spec(barriers={"alignment": "pass"})
    world.seal(1, barrier=(1, "complete"))
    world.sink().follow(world.log)
    assert tags(world) == {}


def test_the_last_twenty_stay_through_compaction_and_retention(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older tags and their snapshots go, and the rows under the others can be read as before."""
    monkeypatch.setattr(table_maintenance, "_NEWEST_SLOTS_KEPT", 2)
    monkeypatch.setattr(table_maintenance, "_MIN_FILES_PER_MERGE", 3)
    sink, clock = world.sink(), ManualClock(wall_ticks=LATER)
    for number in range(1, 25):
        world.seal(1, rows=1, barrier=(number, "complete"))
    sink.follow(world.log)
    before = tags(world)
    assert before.keys() == {f"barrier-{number}" for number in range(5, 25)}
    assert compact_tables(world.spec, world.store)["events"].after < 24
    note_table_versions(world.spec, world.store, grace=0.0, clock=clock)
    delete_orphan_files(world.spec, world.store, grace=0.0, clock=clock)
    report = Retention(
        world.log,
        RetentionPolicy(keep_last=1, keep_for=0, grace=0),
        external=lambda: list_referenced_files(world.spec, world.store),
        published_upto=lambda: find_published_slot(world.spec, world.log),
        rewound=lambda: have_followers_rewound(world.spec, world.log),
        clock=clock,
    ).run()
    assert report.retired
    after = tags(world)
    assert {t: slots["events"] for t, slots in after.items()} == {
        t: slots["events"] for t, slots in before.items()
    }
    assert len(sink.open_table("late").metadata.snapshots) <= 24
