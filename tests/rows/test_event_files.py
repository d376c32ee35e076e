"""The files of the events without Spark: what tasks keep, cut and write."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.rows.units import FOLDERS, WINDOW, order_of, rows_at, slice_of
from tests.spark.agreement import SECOND, spec_of
from tidegate.checkpoints.local_store import LocalStore
from tidegate.errors import TransientError
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.eventtime.decision_types import FIRST_RELEASE_MARK, Member, ReleaseMark
from tidegate.jobs.rows import cut_division, event_files, kept_rows
from tidegate.jobs.rows.cut_division import divide_cut
from tidegate.jobs.rows.event_files import (
    EventMember,
    EventsOrder,
    FileAnswer,
    RangesOrder,
    cut_rows,
    write_share,
    write_targets,
    write_unit_events,
)
from tidegate.jobs.rows.kept_rows import (
    KeptPiece,
    decode_rows,
    encode_kept_rows,
    encode_rows,
)
from tidegate.jobs.rows.unit_reading import read_unit
from tidegate.jobs.sources.byte_streams import ScratchFile
from tidegate.jobs.sources.errors import SCRATCH_UNWRITABLE
from tidegate.jobs.spark import spark_session

MEMBERS = {0: EventMember("a", "0", 0, False), 1: EventMember("b", "0", 1, True)}
AFTER = ReleaseMark(0, 20 * SECOND)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[int, list[KeptPiece]]]:
    """A store, and the rows of two units in small pieces."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 1)
    monkeypatch.setattr(kept_rows, "PIECE_BYTES", 100)
    store = LocalStore(tmp_path)
    spec = spec_of({"a": {}, "b": {}}, windows={"w": WINDOW})
    draw = random.Random(3)
    times = {name: [draw.randint(0, 30) for _ in range(50)] for name in "ab"}
    cut = Cut(tuple(slice_of(store, Member(n), rows_at(*own)) for n, own in times.items()))
    pieces = {}
    for unit in divide_cut(spec, cut, {}, store):
        rows = read_unit(order_of(spec, store), unit).kept
        assert rows is not None
        pieces[unit.number] = list(encode_kept_rows(rows))
        assert len(pieces[unit.number]) > 1
    return (spec, store), pieces


def read_files(store: LocalStore, answers: list[FileAnswer], kind: str) -> pa.Table:
    """The rows of all files of a kind, file by file."""
    assert [answer.error for answer in answers] == [None] * len(answers)
    found = [file for a in answers for file in a.files if file.kind == kind]
    paths = [store.local_path(file.key) for file in found]
    return pa.concat_tables(pq.read_table(path, partitioning=None) for path in paths)


def ranges_of(kept: Any, ranges: Any, maps: int = 2, shares: int = 0) -> RangesOrder:
    """A release of the rows below `AFTER`."""
    (spec, store), _ = kept
    common = (spec, FOLDERS, store.url, 0, MEMBERS, {0: 50, 1: 50})
    return RangesOrder(*common, FIRST_RELEASE_MARK, AFTER, 7, ranges, (), frozenset(), maps, shares)


def test_units_are_written_at_known_positions(kept: Any) -> None:
    """The unit of the second slice may be written first."""
    (spec, store), pieces = kept
    order = EventsOrder(spec, FOLDERS, store.url, 0, MEMBERS, {0: 50, 1: 50})
    answers = [write_unit_events(order, {u: {0: 5, 1: 55}}, u, pieces[u]) for u in (1, 0)]
    rows = read_files(store, answers, "table:events").sort_by("position")
    assert rows["position"].to_pylist() == list(range(5, 105))
    assert rows["_source"].to_pylist() == ["a"] * 50 + ["b"] * 50
    assert rows["_late"].to_pylist() == [False] * 50 + [True] * 50
    assert rows["_seq"].to_pylist() == [*range(50), *range(50)]


def test_a_large_unit_is_written_as_several_files(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task holds the rows of one file; positions go on from file to file."""
    monkeypatch.setattr(event_files, "FILE_BYTES", 1_000)
    (spec, store), pieces = kept
    order = EventsOrder(spec, FOLDERS, store.url, 0, MEMBERS, {0: 50, 1: 50})
    both = [piece for own in pieces.values() for piece in own]
    order = replace(order, kept={0: 100})
    # The second slice leaves first, as if its source stood first in the spec.
    answer = write_unit_events(order, {0: {0: 55, 1: 5}}, 0, both)
    assert len(answer.files) > 3
    assert answer.counts == {"a": 50, "b": 50}
    assert answer.flagged == 0
    rows = read_files(store, [answer], "table:events")
    assert rows["position"].to_pylist() == [*range(55, 105), *range(5, 55)]
    assert rows["_seq"].to_pylist() == [*range(50), *range(50)]
    monkeypatch.undo()
    whole = write_unit_events(order, {0: {0: 55, 1: 5}}, 0, both)
    assert len(whole.files) == 1
    assert answer.newest == whole.newest


def test_pieces_leave_out_what_follows_from_few_numbers() -> None:
    """Rows come back as they were, whatever of them was left out."""
    times = pa.array([5, 7, 6], pa.int64())
    columns = {
        "t": times.cast(pa.timestamp("us", "UTC")),
        "_et": times,
        "_seq": pa.array([4, 5, 6], pa.int64()),
        "_slice": pa.array([2, 2, 2], pa.int32()),
        "_late": pa.array([False, False, False]),
    }
    changes: list[dict[str, Any]] = [
        {},
        {"t": pa.array([5, None, 6], pa.timestamp("us", "UTC"))},
        {"_et": pa.array([5, 7, 8], pa.int64())},
        {"_seq": pa.array([4, 6, 7], pa.int64()), "_late": pa.array([True, True, True])},
        {"_slice": pa.array([2, 3, 2], pa.int32()), "_late": pa.array([True, False, False])},
    ]
    sizes = []
    for change in changes:
        rows = pa.table(columns | change)
        for part in (rows, rows.slice(1, 1), rows.slice(0, 0)):
            data = encode_rows(part)
            assert decode_rows(data).equals(part)
        sizes.append(len(pa.ipc.open_stream(encode_rows(rows)).schema))
    assert sizes == [1, 2, 2, 2, 3]


def test_lost_rows_are_noticed(kept: Any) -> None:
    """An object that has changed cannot be read again."""
    (spec, store), pieces = kept
    order = EventsOrder(spec, FOLDERS, store.url, 0, MEMBERS, {0: 50})
    answer = write_unit_events(order, {0: {0: 5}}, 0, pieces[0][:-1])
    assert isinstance(answer.error, TransientError)
    assert "of 50 rows" in str(answer.error)
    ranges = ranges_of(kept, ((), (), ()), maps=1)
    for answer in write_targets(ranges, cut_rows(ranges, 0, pieces[0])):
        assert isinstance(answer.error, TransientError)


def test_ranges_are_the_same_however_the_rows_arrive(kept: Any) -> None:
    """Sorted by time, source, partition and position, with contiguous positions."""
    (_, store), pieces = kept
    marks = [ReleaseMark(0, t * SECOND) for t in (5, 11)]
    one = ranges_of(kept, ((), (), ()), maps=1)
    every = [piece for own in pieces.values() for piece in own]
    whole = list(write_targets(one, cut_rows(one, 0, every)))
    many = ranges_of(kept, ((), tuple(marks), (ReleaseMark(0, 25 * SECOND),)))
    shipped = [item for task in (1, 0) for item in cut_rows(many, task, reversed(pieces[task]))]
    cut = list(write_targets(many, shipped))
    assert [answer.number for answer in cut] == list(range(6))
    shared = ranges_of(kept, many.ranges, maps=1, shares=2)
    shares = [answer for share in (1, 0) for answer in write_share(shared, share, every)]
    assert [answer.number for answer in shares] == [1, 3, 5, 0, 2, 4]
    shares.sort(key=lambda answer: answer.number)
    for kind in ("table:events", "order"):
        assert read_files(store, cut, kind) == read_files(store, whole, kind)
        assert read_files(store, shares, kind) == read_files(store, whole, kind)
    rows = read_files(store, cut, "table:events")
    assert rows["position"].to_pylist() == list(range(7, 7 + rows.num_rows))
    keys = list(zip(*(rows[c].to_pylist() for c in ("t", "_source", "_seq")), strict=True))
    assert keys == sorted(keys)
    assert max(a.newest for a in cut if a.newest is not None) < AFTER
    waiting = read_files(store, cut, "order")
    assert waiting["_et"].to_pylist() == sorted(waiting["_et"].to_pylist())
    assert waiting["_et"][0].as_py() >= AFTER.time


def test_more_ranges_than_tasks_are_written_one_after_the_other(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two tasks has three ranges, of which it holds one; the others are in a file."""
    (_, store), pieces = kept
    marks = tuple(ReleaseMark(0, t * SECOND) for t in (5, 11, 16))
    order = ranges_of(kept, ((), marks, ()))
    shipped = [item for task in (0, 1) for item in cut_rows(order, task, pieces[task])]
    alone = list(write_targets(order, shipped))
    monkeypatch.setattr(event_files, "MOST_MOVED", 2)
    monkeypatch.setattr(event_files, "_HELD_BYTES", 1_000)
    assert order.moved_to == 2
    held = list[int]()
    write_target = event_files._write_target

    def note_held(answer: FileAnswer, order: RangesOrder, own: Any, summaries: Any) -> None:
        """Note the rows of a target, then write them."""
        held.append(sum(map(len, own)))
        write_target(answer, order, own, summaries)

    monkeypatch.setattr(event_files, "_write_target", note_held)
    answers = [
        answer
        for task in range(2)
        for answer in write_targets(order, [one for one in shipped if one[0] % 2 == task])
    ]
    assert [answer.number for answer in answers] == [0, 2, 4, 1, 3, 5]
    assert sum(held) > 2 * 1_000
    answers.sort(key=lambda answer: answer.number)
    for kind in ("table:events", "order"):
        assert read_files(store, answers, kind) == read_files(store, alone, kind)


def test_a_task_holds_few_rows_of_several_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is in a file, and comes back as it was; rows of a single range are sorted anyway."""
    monkeypatch.setattr(event_files, "_HELD_BYTES", 100)
    given = {(n % 3, n): bytes([n]) * 40 for n in range(20)}
    with closing(event_files._TargetPieces()) as pieces:
        for (target, _), data in given.items():
            pieces.add(target, pa.py_buffer(data))
            assert sum(len(one) for own in pieces._held.values() for one in own) <= 100
        found = [pieces.take(target) for target in range(3)]
        assert [pieces.take(target) for target in range(3)] == [[], [], []]
    for target, own in enumerate(found):
        numbers = range(target, 20, 3)
        assert sorted(one.to_pybytes() for one in own) == [bytes([n]) * 40 for n in numbers]
    with closing(event_files._TargetPieces()) as pieces:
        for data in given.values():
            pieces.add(7, pa.py_buffer(data))
        assert pieces._file is None


def test_a_full_disk_is_the_answer_of_each_range(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was shipped is read before, and the epoch is tried again."""
    _, pieces = kept

    def refuse(self: ScratchFile, data: Any) -> int:
        """Write nothing."""
        raise SCRATCH_UNWRITABLE(folder="/tmp", host="h", cause="full")

    monkeypatch.setattr(ScratchFile, "write", refuse)
    monkeypatch.setattr(event_files, "_HELD_BYTES", 100)
    order = ranges_of(kept, ((), (ReleaseMark(0, 5 * SECOND),), ()), maps=1)
    shipped = cut_rows(order, 0, [piece for own in pieces.values() for piece in own])
    errors = [answer.error for answer in write_targets(order, shipped)]
    assert len(errors) == order.firsts[-1]
    assert all(isinstance(error, TransientError) for error in errors)


def test_the_shuffle_writes_to_disk_for_as_many_tasks_as_rows_are_moved_to() -> None:
    """For more tasks than the threshold Spark would fill the heap first."""
    classic = spark_session._SETTINGS["classic"]
    assert int(classic["spark.shuffle.sort.bypassMergeThreshold"]) == event_files.MOST_MOVED
