"""Rows with long values are read in batches that a task can hold."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.rows.units import WINDOW, describe, order_of, read_all
from tests.spark.agreement import SECOND, spec_of
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.engine.errors import CorruptObjectsError
from tidegate.jobs.engine.interfaces import Cut, Slice, join_seq
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows import long_values, unit_reading
from tidegate.jobs.rows.batch_reading import decode_in_batches, read_in_batches
from tidegate.jobs.rows.cut_division import ReadUnit, divide_cut
from tidegate.jobs.rows.long_values import limit_rows
from tidegate.jobs.rows.slice_reading import CutPart
from tidegate.jobs.rows.slice_scan import scan_slice
from tidegate.jobs.rows.unit_reading import list_parts, select_parts

ROWS = 6_000
MOST_BYTES = 1 << 20
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds for small objects."""
    monkeypatch.setattr(long_values, "MOST_LONG_BYTES", MOST_BYTES)
    monkeypatch.setattr(long_values, "_FEW_VALUES", 2_000)


def part_of(columns: dict[str, pa.Array], start: int = 0, end: int | None = None) -> CutPart:
    """Rows of a Parquet object in memory."""
    table, out = pa.table(columns), io.BytesIO()
    pq.write_table(table, out, row_group_size=2_000)
    kinds = tuple((field.name, str(field.type)) for field in table.schema)
    rows = table.num_rows
    return CutPart(0, "k", "e", 0, rows, start, rows if end is None else end, out, kinds)


def repeat_texts(length: int, rows: int = ROWS) -> pa.Array:
    """A few texts of this length, which take next to no space in an object."""
    return pa.array([LETTERS[n % 26] * length for n in range(rows)])


def draw_texts(length: int, rows: int = ROWS) -> pa.Array:
    """Texts of which each is another."""
    draw = random.Random(length)
    return pa.array([draw.randbytes(length // 2).hex() for _ in range(rows)])


@pytest.mark.parametrize("make", [repeat_texts, draw_texts])
@pytest.mark.parametrize("kind", ["text", "list", "struct", "dictionary", "binary"])
def test_few_rows_are_held_if_values_are_long(make: Any, kind: str) -> None:
    """Whether a footer tells their bytes or not, and in whatever they are."""
    texts = make(400)
    values = {
        "text": texts,
        "binary": texts.cast(pa.binary()),
        "dictionary": texts.dictionary_encode(),
        "list": pa.ListArray.from_arrays(pa.array(range(ROWS + 1), pa.int32()), texts),
        "struct": pa.StructArray.from_arrays([texts], ["a"]),
    }
    columns = {"v": values[kind], "w": repeat_texts(10)}
    most = limit_rows([part_of(columns)])
    assert most is not None
    assert MOST_BYTES / 4 < most * 400 <= MOST_BYTES
    assert limit_rows([part_of(columns)], {"w"}) is None


def test_ordinary_rows_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts, numbers, or few rows: there the division is what it always was."""
    numbers = pa.array(range(ROWS))
    assert limit_rows([part_of({"a": repeat_texts(20), "b": draw_texts(20), "n": numbers})]) is None
    few = part_of({"a": repeat_texts(400), "b": draw_texts(30)})
    assert limit_rows([few]) is not None
    start, end = 2_000, 4_000
    assert limit_rows([part_of({"a": repeat_texts(400)}, start, end)]) is None
    monkeypatch.setattr(pq, "ParquetFile", None)  # nothing is opened
    assert limit_rows([part_of({"n": numbers})]) is None
    assert limit_rows([CutPart(*vars_of(few, row_end=10))]) is None


def vars_of(part: CutPart, **more: Any) -> list[Any]:
    """The fields of a part, some of them changed."""
    return [more.get(name, getattr(part, name)) for name in part.__slots__]


def test_the_limit_is_that_of_the_longest_rows() -> None:
    """Of several row groups and objects; a single row is never divided."""
    mixed = pa.concat_arrays([draw_texts(10, 4_000), draw_texts(2_000, 2_000)])
    most = limit_rows([part_of({"a": repeat_texts(5), "v": mixed})])
    assert most is not None
    assert most * 2_000 <= MOST_BYTES
    both = [part_of({"a": repeat_texts(5), "v": repeat_texts(n)}) for n in (1_000, 4_000)]
    most = limit_rows(both)
    assert most is not None
    assert most * 4_000 <= MOST_BYTES


def test_a_damaged_object_is_refused() -> None:
    """Its key is named, as when its rows are read."""
    part = part_of({"a": repeat_texts(1), "b": repeat_texts(1)})
    damaged = CutPart(*vars_of(part, path=io.BytesIO(b"PAR1 and no more PAR1")))
    with pytest.raises(CorruptObjectsError):
        limit_rows([damaged])


def unit_of(folder: Path) -> tuple[Any, ReadUnit]:
    """A unit of a slice of two objects with long texts."""
    store = LocalStore(folder)
    spec = spec_of({"a": {}}, windows={"w": WINDOW})
    parts = []
    for number in range(2):
        rows = 100
        table = pa.table(
            {
                "t": pa.array([n // 4 * SECOND for n in range(rows)], pa.timestamp("us", "UTC")),
                "k": pa.array([LETTERS[n % 2] * 50 for n in range(rows)]),
                "n": pa.array([1] * rows),
                "v": pa.array([n / 4 for n in range(rows)]),
            }
        )
        path = store.local_path(f"inbox/a/{number}.parquet")
        assert path is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=30)
        part = {"key": f"inbox/a/{number}.parquet", "etag": "e", "size": path.stat().st_size}
        part |= {"ordinal": number, "rows": rows, "row_start": 0, "row_end": rows}
        parts.append({**part, "columns": {f.name: str(f.type) for f in table.schema}})
    whole = Slice(Member("a"), 0, join_seq(1, 100), tuple(parts))
    (unit,) = divide_cut(spec, Cut((whole,)), {}, store)
    return order_of(spec, store), unit


def test_batches_of_long_rows_say_what_the_unit_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answer and rows; no batch has more rows than it may."""
    order, unit = unit_of(tmp_path)
    whole, kept = read_all(order, unit)
    monkeypatch.setattr(long_values, "MOST_LONG_BYTES", 54 * 30)
    monkeypatch.setattr(long_values, "_FEW_VALUES", 0)
    sizes = list[int]()

    def note_rows(*given: Any, **more: Any) -> Any:
        """Scan, and note how many rows there were."""
        found = scan_slice(*given, **more)
        sizes.append(found[1].num_rows)
        return found

    monkeypatch.setattr(unit_reading, "scan_slice", note_rows)
    answer, rows = read_all(order, unit)
    assert len(sizes) > 6
    assert max(sizes) <= 30
    assert sum(sizes) == 200
    # The second object is opened again after the rows of the first one.
    assert whole.read_bytes < answer.read_bytes <= 2 * whole.read_bytes
    answer.read_bytes = whole.read_bytes
    answer.most_rows = None  # says so much of the batches alone
    assert describe(answer, rows) == describe(whole, kept)


def test_rows_for_spark_sql_are_decoded_in_such_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of the unit come, in their order."""
    order, unit = unit_of(tmp_path)
    chosen, columns = select_parts(unit, (0, 1)), list_parts(unit)[0].columns

    def decode() -> list[pa.Table]:
        """The rows of each batch."""
        found = [one.kept for one in decode_in_batches(order, chosen, columns, str)]
        return [rows for rows in found if rows is not None]

    (whole,) = decode()
    monkeypatch.setattr(long_values, "MOST_LONG_BYTES", 54 * 30)
    monkeypatch.setattr(long_values, "_FEW_VALUES", 0)
    batches = decode()
    assert max(rows.num_rows for rows in batches) <= 30
    assert pa.concat_tables(batches).to_pylist() == whole.to_pylist()


def test_an_object_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its values are measured first."""
    order, unit = unit_of(tmp_path)
    monkeypatch.setattr(long_values, "_FEW_VALUES", 0)
    (tmp_path / "inbox/a/1.parquet").unlink()
    *_, last = read_in_batches(order, unit)
    assert last.answer.corrupt == ("inbox/a/1.parquet",)


def test_rows_of_a_share_are_measured_where_they_are() -> None:
    """What was decoded for a share begins behind the rows of other shares."""
    whole = part_of({"s": repeat_texts(1_000)})
    share = replace(whole, rows=90_000, row_start=70_000, row_end=76_000, skipped=70_000)
    assert limit_rows([share]) == limit_rows([whole]) == 1_044


def test_many_objects_are_measured_together() -> None:
    """Objects of few values are many values in one task."""
    small = part_of({"s": repeat_texts(1_000, 1_900)})
    assert limit_rows([small]) is None
    assert limit_rows([small, small]) == 1_044
