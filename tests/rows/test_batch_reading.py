"""Units with more values than a task holds at once, with a lowered bound."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.rows.units import WINDOW, describe, order_of, read_all, rows_at, slice_of
from tests.spark.agreement import SECOND, rows_of, spec_of, table_of
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.engine.interfaces import Cut, Slice, join_seq
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows import batch_reading, slice_reading, unit_reading
from tidegate.jobs.rows.batch_reading import decode_in_batches, fold_in_batches, read_in_batches
from tidegate.jobs.rows.column_casts import cast_to_declared
from tidegate.jobs.rows.cut_division import ReadUnit, divide_cut
from tidegate.jobs.rows.object_reading import (
    FoundObject,
    InspectionUnit,
    describe_unit,
    open_part,
)
from tidegate.jobs.rows.slice_scan import MOST_CELLS
from tidegate.jobs.rows.stored_partials import StoredTable
from tidegate.jobs.rows.unit_reading import (
    ReadOrder,
    UnitAnswer,
    list_parts,
    read_unit,
    select_parts,
)
from tidegate.jobs.rules.duck_frame import DuckFrame
from tidegate.jobs.sources.object_inspection import Footer, InspectedObject

LATE = 8
"""Rows before this second are late."""
AGGREGATES = {"n": "count(*)", "s": "sum(v)", "last": "last(n)", "all": "collect(n)"}
WINDOWS = {
    "w": {**WINDOW, "aggregates": AGGREGATES},
    "s": {**WINDOW, "kind": "session", "size": None, "gap": "2s"},
}
SOURCES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rules": {"where": "n < 5", "rules": {"odd": {"predicate": "n <> 3"}}},
    "punctuation": {"punctuation": {"every_events": 3, "delay": "1s"}},
    "jumps": {"max_jump": "12s"},
    "barriers": {"barriers": {"kind": "kind", "types": ["stop"], "punctuation": "data"}},
}


def read_files(answer: UnitAnswer, folder: Path) -> list[str]:
    """The rows of late and dead-letter tables."""
    files = [*answer.late.written, *answer.dead.written]
    rows = [row for ref in files for row in pq.read_table(folder / ref.key).to_pylist()]
    return sorted(map(repr, rows))


def slice_of_objects(store: LocalStore, member: Member, tables: list[pa.Table]) -> Slice:
    """A slice of several objects with small row groups, of the first one in part."""
    (example,) = slice_of(store, Member("example"), rows_at(1)).parts
    parts = []
    for number, table in enumerate(tables):
        key = f"inbox/{member.source}/{member.partition}-{number}.parquet"
        path = store.local_path(key)
        assert path is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=4)
        more = {"key": key, "ordinal": number, "rows": table.num_rows, "row_end": table.num_rows}
        parts.append({**example, **more, "row_start": 0 if number else 3})
    end = join_seq(len(tables) - 1, tables[-1].num_rows)
    return Slice(member, join_seq(0, 3), end, tuple(parts))


def draw_unit(folder: Path, what: str, seed: int) -> tuple[ReadOrder, ReadUnit]:
    """A unit of two slices, with late and dead rows."""
    draw, store = random.Random(f"{what}{seed}"), LocalStore(folder)
    spec = spec_of({"a": SOURCES[what], "b": {}}, windows=WINDOWS)
    pieces = []
    for source in "ab":
        rows = [row for around in range(4) for row in rows_of(draw, 5 * around)]
        for row in rows:
            row["t"] = row["t"] if draw.random() < 0.9 else None
        rows += [{**row, "v": 0.25} for row in rows_at(*range(9))]  # with exact sums
        tables = [table_of(rows[:20]), table_of(rows[20:])]
        pieces.append(slice_of_objects(store, Member(source), [t for t in tables if t.num_rows]))
    state = {"clock": 10 * SECOND, "members": {"a/0": None, "b/0": None}}
    (unit,) = divide_cut(spec, Cut(tuple(pieces)), state, store)
    return order_of(spec, store, LATE * SECOND), unit


@pytest.mark.parametrize("what", SOURCES)
@pytest.mark.parametrize("seed", range(3))
def test_batches_say_what_the_whole_unit_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, seed: int
) -> None:
    """Survey, verdicts, partial aggregates, late and dead rows, and the rows for the events."""
    order, unit = draw_unit(tmp_path, what, seed)
    spec = order.spec
    whole = read_unit(order, unit)
    monkeypatch.setattr(batch_reading, "MOST_CELLS", 7 * spec.sources["a"].width)
    assert len(batch_reading.divide_unit(spec, unit)) > 5
    answer, kept = read_all(order, unit)
    first = next((one.survey.barrier for one in whole.answer.slices if one.survey.barrier), None)
    if first is not None:  # the slice is planned and read again
        surveys = [[one.survey for one in found.slices] for found in (whole.answer, answer)]
        assert surveys[0] == surveys[1]
        return
    assert describe(answer, kept) == describe(whole.answer, whole.kept)
    assert read_files(answer, tmp_path) == read_files(whole.answer, tmp_path)


@pytest.mark.parametrize("is_read_whole", [False, True], ids=["batches", "whole"])
@pytest.mark.parametrize("what", SOURCES)
def test_batches_of_evaluated_rows_say_what_the_whole_unit_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, *, is_read_whole: bool
) -> None:
    """Rows are read in batches, arrive in pieces of any size, and are folded in the same batches.

    Objects of one form may be few enough to be read at once, although those of the unit are not.
    """
    order, unit = draw_unit(tmp_path, what, 0)
    spec = order.spec
    whole = read_unit(order, unit)
    most = 7 * spec.sources["a"].width
    monkeypatch.setattr(batch_reading, "MOST_CELLS", MOST_CELLS if is_read_whole else most)
    arrived: list[pa.Table] = []
    numbered = list(enumerate(list_parts(unit)))
    for source in "ab":
        own = [(place, p) for place, p in numbered if p.key.startswith(f"inbox/{source}/")]
        chosen = select_parts(unit, tuple(place for place, _ in own))
        readings = list(decode_in_batches(order, chosen, own[0][1].columns, str))
        assert is_read_whole or len(readings) > 1
        for rows_read in [reading.kept for reading in readings]:
            physical = dict(own[0][1].columns)
            frame = cast_to_declared(
                DuckFrame.from_table(rows_read), spec.sources[source], physical
            )
            arrived += map(pa.Table.from_batches, ([b] for b in frame.toArrow().to_batches(5)))
        assert sum(reading.answer.rows for reading in readings[-1:]) == len(
            rows_of_slice(unit, source)
        )
    monkeypatch.setattr(batch_reading, "MOST_CELLS", most)
    folded = list(fold_in_batches(order, unit, arrived))
    kept = [reading.kept for reading in folded if reading.kept is not None]
    answer = folded[-1].answer
    found = describe(answer, pa.concat_tables(kept) if kept else None)
    wanted = describe(whole.answer, whole.kept)
    if any(
        one.survey.barrier for one in whole.answer.slices
    ):  # the slice is planned and read again
        assert [one["survey"] for one in found["slices"]] == [
            one["survey"] for one in wanted["slices"]
        ]
        return
    assert found | {"read_bytes": 0} == wanted | {"read_bytes": 0}


def rows_of_slice(unit: ReadUnit, source: str) -> range:
    """As many numbers as the slice of a source has rows."""
    own = (piece.parts for piece in unit.cut.slices if piece.member.source == source)
    return range(sum(part["row_end"] - part["row_start"] for parts in own for part in parts))


def test_a_task_holds_a_batch_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads only the row groups of a batch, fetches each object once, and sums alike again."""
    store, most, held = LocalStore(tmp_path), 40, list[int]()
    spec = spec_of({"a": {}}, windows={"w": WINDOW})
    rows = table_of([{**row, "v": 0.1 * n} for n, row in enumerate(rows_at(*range(1000)))])
    (unit,) = divide_cut(
        spec, Cut((slice_of_objects(store, Member("a"), [rows, rows]),)), {}, store
    )
    monkeypatch.setattr(batch_reading, "MOST_CELLS", most * spec.sources["a"].width)
    opened, some = list[str](), slice_reading._read_some_rows

    def count_opened(index: int, part: Any, *given: Any) -> Any:
        opened.append(part["key"])
        return open_part(index, part, *given)

    def count_rows(*given: Any) -> pa.Table:
        found = some(*given)
        held.append(found.num_rows)
        return found

    monkeypatch.setattr(unit_reading, "open_part", count_opened)
    monkeypatch.setattr(slice_reading, "_read_some_rows", count_rows)
    order = order_of(spec, store)
    answer, kept = read_all(order, unit)
    assert kept is not None
    assert (answer.rows, kept.num_rows, sum(held)) == (1997, 1997, 1997)
    assert max(held) <= most
    assert opened == [part["key"] for part in unit.cut.slices[0].parts]
    assert answer.read_bytes == sum(part["size"] for part in unit.cut.slices[0].parts)
    assert read_all(order, unit)[0].partials == answer.partials
    # One object is damaged: the unit says so, and nothing else.
    (tmp_path / unit.cut.slices[0].parts[1]["key"]).write_bytes(b"PAR1 no more PAR1")
    assert read_all(order, unit)[0].corrupt == (unit.cut.slices[0].parts[1]["key"],)


def test_partial_aggregates_of_all_batches_are_sent_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a unit that is read at once."""
    store = LocalStore(tmp_path)
    spec = spec_of({"a": {}}, windows={"w": WINDOW})
    (unit,) = divide_cut(spec, Cut((slice_of(store, Member("a"), rows_at(*range(9))),)), {}, store)
    monkeypatch.setattr(batch_reading, "MOST_CELLS", spec.sources["a"].width)
    order = order_of(spec, store)
    stored = read_all(replace(order, sent_bytes=1), unit)[0].partials["w"]
    assert isinstance(stored, StoredTable)


def count_scratch_files() -> int:
    """Open files of this process that have no name."""
    links = Path("/proc/self/fd").iterdir()
    return sum(path.is_symlink() and "(deleted)" in os.readlink(path) for path in links)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_decoded_rows_are_gone_after_their_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """Batches share the file of decoded rows; it is closed also if a later object is damaged."""
    store, spec = LocalStore(tmp_path), spec_of({"a": {"format": "json"}}, windows={"w": WINDOW})
    lines = b'{"t": "2026-01-01T00:00:00Z", "n": 1}\n' * 50
    parts = []
    for ordinal in range(2):
        (tmp_path / str(ordinal)).write_bytes(lines)
        source = spec.sources["a"]
        found = FoundObject(str(ordinal), store.uri(str(ordinal)), len(lines))
        (inspected,) = describe_unit(InspectionUnit(0, source, (found,))).found
        assert isinstance(inspected, InspectedObject)
        assert isinstance(inspected.content, Footer)
        part = {"key": found.key, "etag": inspected.etag, "size": len(lines), "ordinal": ordinal}
        rows = {"rows": 50, "row_start": 0, "row_end": 50}
        parts.append({**part, **rows, "columns": inspected.content.columns})
    cut = Cut((Slice(Member("a"), 0, join_seq(1, 50), tuple(parts)),))
    (unit,) = divide_cut(spec, cut, {}, store)
    if is_damaged:
        (tmp_path / "1").write_bytes(b"")
    monkeypatch.setattr(batch_reading, "MOST_CELLS", 25 * spec.sources["a"].width)
    before, open_files = count_scratch_files(), list[int]()
    for reading in read_in_batches(order_of(spec, store), unit):
        open_files.append(count_scratch_files() - before)
        answer = reading.answer
    del reading
    assert max(open_files) == 1
    assert count_scratch_files() == before
    assert (answer.rows, answer.corrupt) == ((50, ("1",)) if is_damaged else (100, ()))
