"""The kernel without Spark: how a cut is divided, and what is said of a unit."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.rows.units import FOLDERS, WINDOW, order_of, rows_at, slice_of
from tests.spark.agreement import SECOND, spec_of
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.store import NotFoundError
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows import cut_division
from tidegate.jobs.rows.column_casts import cast_to_declared
from tidegate.jobs.rows.cut_division import divide_cut
from tidegate.jobs.rows.object_reading import (
    FoundObject,
    LocalFile,
    describe_unit,
    divide_objects,
    open_part,
)
from tidegate.jobs.rows.slice_reading import group_similar_parts
from tidegate.jobs.rows.stored_partials import StoredTable, decode_table
from tidegate.jobs.rows.task_support import (
    explain_spark_expressions,
)
from tidegate.jobs.rows.unit_reading import (
    UnitAnswer,
    decode_parts,
    fold_unit,
    list_parts,
    read_unit,
    select_parts,
)
from tidegate.jobs.rules.duck_frame import DuckFrame
from tidegate.jobs.sources.object_decoding import BadObject
from tidegate.jobs.sources.object_inspection import Footer, InspectedObject
from tidegate.time_units import TICK_MIN

OFF = {"release": {"mode": "pass_through"}, "outputs": {"events": False}}


def decode_sent(answer: UnitAnswer, name: str) -> pa.Table:
    """The partial aggregates of a window, which the answer has."""
    packed = answer.partials[name]
    assert isinstance(packed, bytes)
    return decode_table(packed)


def answer_of(folder: Path, frontier: int, *seconds: int, **window: Any) -> UnitAnswer:
    """What a task answers to a unit with rows at these times."""
    store = LocalStore(folder)
    spec = spec_of({"a": {}}, windows={"w": {**WINDOW, **window}}, **OFF)
    cut = Cut((slice_of(store, Member("a"), rows_at(*seconds)),))
    (unit,) = divide_cut(spec, cut, {}, store)
    order = order_of(spec, store, frontier)
    # As Spark sends them.
    reading = pickle.loads(pickle.dumps(read_unit(*pickle.loads(pickle.dumps((order, unit))))))
    assert reading.report.pid == os.getpid()
    assert reading.report.cpu >= 0
    assert reading.kept is None
    found: UnitAnswer = reading.answer
    return found


def test_small_slices_share_a_unit_and_large_ones_have_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the cut; a slice without rows is in none."""
    store = LocalStore(tmp_path)
    counts = {"a": 1, "b": 0, "c": 2, "d": 3}
    spec = spec_of({name: {} for name in counts}, windows={"w": WINDOW}, **OFF)
    cut = Cut(tuple(slice_of(store, Member(n), rows_at(*range(c))) for n, c in counts.items()))
    assert [unit.indexes for unit in divide_cut(spec, cut, {}, store)] == [(0, 2, 3)]
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 540_000)
    assert [unit.indexes for unit in divide_cut(spec, cut, {}, store)] == [(0, 2), (3,)]
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 1)
    units = divide_cut(spec, cut, {"clock": 5, "members": {"a/0": {"x": 1}, "e/0": {}}}, store)
    assert [unit.indexes for unit in units] == [(0,), (2,), (3,)]
    assert units[0].state == {"clock": 5, "members": {"a/0": {"x": 1}}}
    assert divide_cut(spec, Cut(()), {}, store) == []


def test_a_unit_is_surveyed_and_folded(tmp_path: Path) -> None:
    """Each row is in one window, and the partial aggregates have no marks yet."""
    answer = answer_of(tmp_path, TICK_MIN, 1, 2, 14)
    assert (answer.number, answer.rows, answer.left, answer.error) == (0, 3, None, None)
    (found,) = answer.slices
    assert (found.index, found.survey.rows, found.survey.max_time) == (0, 3, 14 * SECOND)
    folded = decode_sent(answer, "w").sort_by("_ws").to_pylist()
    assert [(row["_ws"], row["_k0"], row["_s0"]) for row in folded] == [
        (0, "x", 2),
        (10 * SECOND, "x", 1),
    ]
    assert not {"_on", "_up", "_n", "_epoch"} & folded[0].keys()
    assert answer.late.written == ()


def test_rows_that_are_evaluated_between_two_tasks_give_the_same(tmp_path: Path) -> None:
    """Whoever evaluates them; here it is DuckDB, of two slices with columns of two types."""
    rules = {"small": {"predicate": "n < 3", "severity": "drop"}, "odd": {"predicate": "n <> 2"}}
    source = {"where": "n > 0", "rules": rules}
    store = LocalStore(tmp_path)
    sources: dict[str, dict[str, Any]] = {"a": source, "b": {"max_jump": "5s"}}
    spec = spec_of(sources, windows={"w": WINDOW}, release={"mode": "commit"})
    rows = [{**row, "n": n} for n, row in enumerate([*rows_at(1, 40, 2, 30), {"t": None}])]
    cut = Cut(tuple(slice_of(store, Member(name), rows) for name in sources))
    (unit,) = divide_cut(spec, cut, {}, store)
    order = order_of(spec, store, 5 * SECOND)
    whole = read_unit(order, unit)
    tables, read = [], 0
    parts = list(enumerate(list_parts(unit)))
    for (columns, _), similar in group_similar_parts(spec, unit.cut, parts).items():
        ((place, part),) = similar
        found = decode_parts(order, select_parts(unit, (place,)), columns, str)
        read += found.answer.read_bytes
        source_spec = spec.sources[cut.slices[part.member].member.source]
        frame = cast_to_declared(DuckFrame.from_table(found.kept), source_spec, dict(columns))
        tables.append(frame.toArrow())
    apart = fold_unit(order, unit, pa.concat_tables(tables))
    assert read == whole.answer.read_bytes > 0
    assert whole.answer.dead.counts["a", "rule:odd"] == 1
    for name in ("rows", "slices", "partials", "kept", "error"):
        assert getattr(apart.answer, name) == getattr(whole.answer, name), name
    for name in ("late", "dead"):
        assert getattr(apart.answer, name).counts == getattr(whole.answer, name).counts, name
    assert apart.kept == whole.kept
    assert fold_unit(order, unit, None).answer.rows == 0


@pytest.mark.parametrize(
    ("policy", "written", "counted"),
    [("side_output", 2, 2), ("drop", 0, 2), ("error", 0, 0)],
)
def test_late_rows_are_files_counts_or_a_refusal(
    tmp_path: Path, policy: str, written: int, counted: int
) -> None:
    """The files lie in the attempt's folder, under a random name."""
    answer = answer_of(tmp_path, 20 * SECOND, 25, 3, 2, on_late=policy)
    assert sum(file.rows for file in answer.late.written) == written
    assert answer.late.counts["a", "late_rows"] == counted
    assert bool(answer.late_refused) is (policy == "error")
    if policy == "error":
        assert "row 1: event time 3000000 is late for w" in str(answer.late_refused["w"])
    for file in answer.late.written:
        assert file.key.startswith(FOLDERS.table_prefix("late"))
        assert (file.min_time, file.max_time) == (2 * SECOND, 3 * SECOND)
        table = pq.read_table(tmp_path / file.key, partitioning=None)
        assert set(table["_epoch"].to_pylist()) == {7}


@pytest.mark.parametrize("on_bad", ["dead_letter", "fail"])
def test_dead_rows_are_letters_counts_or_a_refusal(tmp_path: Path, on_bad: str) -> None:
    """What `where` leaves out and a rule drops is counted only."""
    rules = {
        "small": {"predicate": "n < 3", "severity": "drop"},
        "low": {"predicate": "v < 0.2", "severity": "quarantine"},
        "odd": {"predicate": "n % 2 = 1"},
    }
    store = LocalStore(tmp_path)
    spec = spec_of(
        {"a": {"where": "n > 0", "rules": rules, "on_bad": on_bad}}, windows={"w": WINDOW}, **OFF
    )
    values = [(1, 1, 0.1), (1, 0, 0.1), (None, 1, 0.1), (1, 5, 0.1), (1, 1, 0.5), (1, 2, 0.1)]
    rows = [{"t": t and t * SECOND, "k": "x", "n": n, "v": v} for t, n, v in values]
    (unit,) = divide_cut(spec, Cut((slice_of(store, Member("a"), rows),)), {}, store)
    answer = read_unit(order_of(spec, store), unit).answer
    if on_bad == "fail":
        assert 'row 2 of inbox/a/0.parquet: no_event_time (t): {"k":"x","n":1,"v":0.1}' in str(
            answer.dead_refused
        )
        assert answer.dead.written == ()
        return
    (letters,) = (pq.read_table(tmp_path / file.key) for file in answer.dead.written)
    reasons = dict(zip(letters["_seq"].to_pylist(), letters["reason"].to_pylist(), strict=True))
    assert reasons == {2: "no_event_time", 4: "rule_quarantined"}
    assert answer.dead.late == {("a", "events", "rule", True): 1}
    assert answer.dead.counts == {
        ("a", "dead_lettered"): 1,
        ("a", "filtered"): 1,
        ("a", "rule:low"): 1,
        ("a", "rule:odd"): 1,
        ("a", "rule:small"): 1,
        ("a", "rule_quarantined"): 1,
        ("a", "rule_warned"): 1,
    }
    assert sum(row["_s0"] for row in decode_sent(answer, "w").to_pylist()) == 2


def test_a_damaged_object_is_an_answer(tmp_path: Path) -> None:
    """No failure of the task, which Spark would try again."""
    store = LocalStore(tmp_path)
    spec = spec_of({"a": {}}, windows={"w": WINDOW}, **OFF)
    damaged = slice_of(store, Member("a"), rows_at(1))
    (unit,) = divide_cut(spec, Cut((damaged,)), {}, store)
    (tmp_path / damaged.parts[0]["key"]).write_bytes(b"PAR1 no more PAR1")
    answer = read_unit(order_of(spec, store), unit).answer
    assert answer.corrupt == (damaged.parts[0]["key"],)


def test_objects_are_inspected_by_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each object is described, or the store's error is; large ones have units of their own."""
    source = spec_of({"a": {"format": "json"}}, windows={}, **OFF).sources["a"]
    found = []
    for name, lines in (("1", 2), ("2", 0), ("3", 1)):
        path = tmp_path / name
        path.write_bytes(b'{"t": "2026-01-01T00:00:00Z"}\n' * lines)
        found.append(FoundObject(f"inbox/{name}", str(path), 200_000))
    found.append(FoundObject("inbox/4", str(tmp_path / "4"), 1))
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 950_000)
    units = divide_objects(source, found)
    assert [len(unit.objects) for unit in units] == [2, 2]
    first, second = (describe_unit(unit) for unit in units)
    one, empty, last, missing = [*first.found, *second.found]
    assert isinstance(one, InspectedObject)
    assert isinstance(one.content, Footer)
    assert (one.content.rows, one.content.columns["n"]) == (2, "int64")
    assert isinstance(empty, InspectedObject)
    assert empty.content == BadObject("empty_object", "the object has no bytes")
    assert isinstance(last, InspectedObject)
    assert isinstance(missing, NotFoundError)
    assert second.read_bytes == last.size


def test_plain_objects_are_inspected_as_well(tmp_path: Path) -> None:
    """A small one: its footer is read with all of it."""
    store = LocalStore(tmp_path)
    (part,) = slice_of(store, Member("a"), rows_at(1, 2)).parts
    source = spec_of({"a": {}}, windows={}, **OFF).sources["a"]
    (tmp_path / "bad").write_bytes(b"no Parquet")
    objects = [FoundObject(key, str(tmp_path / key), part["size"]) for key in (part["key"], "bad")]
    (unit,) = divide_objects(source, objects)
    good, bad = describe_unit(unit).found
    assert isinstance(good, InspectedObject)
    assert isinstance(good.content, Footer)
    assert (good.content.rows, good.content.columns) == (2, part["columns"])
    assert isinstance(bad, InspectedObject)
    assert isinstance(bad.content, BadObject)


def test_a_file_whose_name_is_not_utf8_is_read(tmp_path: Path) -> None:
    """A task has its address, with the name escaped in it; Arrow would not open the file."""
    store = LocalStore(tmp_path)
    piece = slice_of(store, Member("a"), rows_at(1, 2))
    spec = spec_of({"a": {}}, windows={}, **OFF)
    (part,) = piece.parts
    odd = Path(os.fsdecode(b"\xe9.parquet"))
    (tmp_path / part["key"]).rename(tmp_path / odd)
    (found,) = store.list_objects("%")
    assert store.local_path(found.key) is None
    described = FoundObject(found.key, store.uri(found.key), found.size)
    (unit,) = divide_objects(spec.sources["a"], [described])
    (inspected,) = describe_unit(unit).found
    assert isinstance(inspected, InspectedObject)
    assert inspected.content == Footer(2, part["columns"])
    opened = open_part(0, {**part, "key": found.key}, described.uri, spec.sources["a"])
    assert isinstance(opened.path, LocalFile)
    assert pq.read_metadata(opened.path).num_rows == 2


def test_many_partial_aggregates_go_by_way_of_the_store(tmp_path: Path) -> None:
    """Spark bounds what tasks send."""
    store = LocalStore(tmp_path)
    spec = spec_of({"a": {}}, windows={"w": WINDOW}, **OFF)
    (unit,) = divide_cut(spec, Cut((slice_of(store, Member("a"), rows_at(1)),)), {}, store)
    order = order_of(spec, store)
    sent = read_unit(order, unit).answer
    answer = read_unit(replace(order, sent_bytes=1), unit).answer
    stored = answer.partials["w"]
    assert isinstance(stored, StoredTable)
    assert store.get(stored.key).data == sent.partials["w"]
    assert (stored.rows, stored.bytes) == (1, len(store.get(stored.key).data))


def test_casts_that_are_not_proven_are_evaluated_by_spark_sql(tmp_path: Path) -> None:
    """The plan knows the types of the objects; the tasks do the rest."""
    store = LocalStore(tmp_path)
    spec = spec_of({"a": {"schema": {"t": "timestamp", "v": "float"}}}, windows={}, **OFF)
    units = divide_cut(spec, Cut((slice_of(store, Member("a"), rows_at(1)),)), {}, store)
    assert explain_spark_expressions(spec, units) == "column v is double, declared float"
