"""Several tasks decode one object: each reads its own bytes, and all of them its rows."""

from __future__ import annotations

import gzip
import io
import random
import tempfile
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sources import encoded_objects
from tests.sources.encoded_objects import CSV_PIECES, LINE, spec, write_typed
from tests.spark.agreement import divide_finely
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.engine.errors import CorruptObjectsError
from tidegate.jobs.engine.interfaces import Cut, Slice, join_seq
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows.cut_division import divide_cut
from tidegate.jobs.rows.object_reading import (
    FoundObject,
    LocalFile,
    count_read_bytes,
    describe_unit,
    divide_objects,
    open_part,
)
from tidegate.jobs.rows.slice_reading import read_parts
from tidegate.jobs.sources import byte_streams, text_chunks
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_inspection import Footer, InspectedObject, restore_footer
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spec.pipeline import ReadLimits
from tidegate.jobs.spec.source_spec import SourceSpec
from tidegate.json_types import JsonObject

ODD_LINES = [LINE, "", " ", "\r", "\ufeff{}", "\udcff", "x" * 50, '{"at": "never"}', "[1]"]


def use_chunks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Decode and read so many bytes at a time, and divide wherever it is possible."""
    encoded_objects.use_chunks(monkeypatch, size)
    monkeypatch.setattr(byte_streams, "READ_BYTES", size)
    divide_finely(monkeypatch)


def plan_object(store: LocalStore, name: str, data: bytes, source: SourceSpec) -> JsonObject | None:
    """A part of a slice with all rows of a new object; None if it is a dead letter."""
    key = f"inbox/a/{name}"
    store.put(key, data)
    (unit,) = divide_objects(source, [FoundObject(key, store.uri(key), len(data))])
    (found,) = describe_unit(unit).found
    assert isinstance(found, InspectedObject)
    if not isinstance(found.content, Footer):
        return None
    part = {"key": key, "etag": found.etag, "size": found.size, "ordinal": 3}
    rows = {"rows": found.content.rows, "row_start": 0, "row_end": found.content.rows}
    breaks = found.content.list_breaks(0, found.content.rows)
    return {**part, **rows, "columns": found.content.columns, **breaks}


def divide_part(store: LocalStore, part: JsonObject, source: SourceSpec) -> list[JsonObject]:
    """What each task reads of a part."""
    start, end = (join_seq(part["ordinal"], part[name]) for name in ("row_start", "row_end"))
    cut = Cut((Slice(Member("a"), start, end, (part,)),))
    pipeline = spec().model_copy(update={"sources": {"a": source}})
    return [one for u in divide_cut(pipeline, cut, {}, store) for one in u.cut.slices[0].parts]


def read_rows(store: LocalStore, part: JsonObject, source: SourceSpec) -> Any:
    """The rows with their places, and why they are bad."""
    own = open_part(0, part, store.uri(part["key"]), source)
    return read_parts(own.columns, [(0, own)], source)


def read_shared(name: str, data: bytes, options: dict[str, Any], size: int) -> tuple[int, Any, Any]:
    """The number of shares of an object in chunks of this size, and its rows, shared and whole."""
    source = spec(**options).sources["a"]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        store = LocalStore(Path(folder))
        use_chunks(patch, size)
        part = plan_object(store, name, data, source)
        if part is None or not part["rows"]:
            return 0, None, None
        shares = divide_part(store, part, source)
        shared = pa.concat_tables([read_rows(store, one, source) for one in shares])
        bare = {name: part[name] for name in part.keys() - {"breaks", "offsets"}}
        return len(shares), shared, read_rows(store, bare, source)


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(CSV_PIECES), max_size=30),
    start=st.sampled_from(
        ["at,item,amount\n", '\ufeff"at","it\nem"\r\n', "\n\nat\n", "\n\r\n", ""]
    ),
    size=st.integers(3, 40),
    header=st.booleans(),
)
def test_shares_of_csv_have_the_rows_of_the_whole(
    pieces: list[str], start: str, size: int, header: bool
) -> None:
    """Values, numbers of rows and reasons, whatever is quoted, broken or blank."""
    data = (start + "".join(pieces)).encode("utf-8", "surrogateescape")
    _, shared, whole = read_shared("1", data, {"format": "csv", "parse": {"header": header}}, size)
    assert shared == whole


@settings(max_examples=40, deadline=None)
@given(lines=st.lists(st.sampled_from(ODD_LINES), max_size=20), size=st.integers(1, 40))
def test_shares_of_lines_have_the_rows_of_the_whole(lines: list[str], size: int) -> None:
    """Also undeclared fields, of which one share alone may have none."""
    data = "\n".join(lines).encode("utf-8", "surrogateescape")
    options = {"format": "json", "evolution": {"added": "ignore"}}
    _, shared, whole = read_shared("1", data, options, size)
    assert shared == whole


ROWS = "".join(f'2026-03-01T00:00:00Z,"{"b" * (n % 9)},\r\nc",{n}\r\n' for n in range(60))
TEXTS: dict[str, tuple[str, JsonObject]] = {
    "csv": (f"at,item,amount\r\n{ROWS}", {"format": "csv"}),
    "csv-mark": (f"\ufeffat,item,amount\n{ROWS}broken\n\n{ROWS}x", {"format": "csv"}),
    "csv-blank": ("\n" * 500 + f"at,amount\n{ROWS}" + "\n" * 500, {"format": "csv"}),
    "csv-bare": (ROWS, {"format": "csv", "parse": {"header": False}}),
    "json": ("\n".join(LINE % n for n in range(60)), {"format": "json"}),
    "json-long": ("\n".join([LINE % 1, "x" * 1300, LINE % 2] * 9), {"format": "json"}),
}


def make_object(name: str) -> tuple[bytes, JsonObject]:
    """An object that can be divided, and the options of its source."""
    if name in TEXTS:
        return TEXTS[name][0].encode(), TEXTS[name][1]
    if name != "avro-nested":
        data, form = write_typed(name)
        return data, {"format": form}
    place = {"type": "record", "name": "place", "fields": [{"name": "x", "type": "int"}]}
    time = {"type": "long", "logicalType": "timestamp-micros"}
    kinds = {"at": time, "item": {"type": "array", "items": place}, "amount": ["null", "int"]}
    fields = [{"name": field, "type": kind} for field, kind in kinds.items()]
    rows = [{"at": 0, "item": [{"x": n}], "amount": None} for n in range(90)]
    out = io.BytesIO()
    record = {"type": "record", "name": "r", "fields": fields}
    fastavro.writer(out, record, rows, sync_interval=50)
    return out.getvalue(), {"format": "avro"}


DIVISIBLE = [
    *TEXTS,
    "avro-null",
    "avro-deflate",
    "avro-snappy",
    "avro-zstandard",
    "avro-nested",
    "orc",
]


@pytest.mark.parametrize("name", DIVISIBLE)
def test_tasks_share_an_object_that_is_decoded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each row is in one share, with the number and the values that it has in the whole."""
    monkeypatch.setattr(text_chunks, "MOST_ROW_BYTES", 1200)
    data, options = make_object(name)
    number, shared, whole = read_shared("1", data, options, 200)
    assert number > 3
    assert shared == whole


@pytest.mark.parametrize("name", ["1.csv.gz"])
def test_some_objects_are_decoded_by_one_task(name: str) -> None:
    """Nothing can be read of a compressed text without what is before it."""
    data, options = make_object(name.split(".")[1])
    packed = gzip.compress(data) if name.endswith("gz") else data
    number, shared, whole = read_shared(name, packed, options, 200)
    assert number == 1
    assert shared == whole


@pytest.mark.parametrize("name", DIVISIBLE)
def test_a_share_reads_its_own_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And the header: as many as it reports, also if the slice is a part of the object."""
    use_chunks(monkeypatch, 200)
    data, options = make_object(name)
    store, source = LocalStore(tmp_path), spec(**options).sources["a"]
    part = plan_object(store, "1", data, source)
    assert part is not None
    whole = read_rows(store, part, source)
    read: list[int] = []
    read_range = LocalFile.read_range

    def read_counted(file: LocalFile, start: int, length: int) -> bytes:
        found = read_range(file, start, length)
        read.append(len(found))
        return found

    monkeypatch.setattr(LocalFile, "read_range", read_counted)
    footer = restore_footer(part)
    dice = random.Random(name)
    for _ in range(9):
        start, end = sorted(dice.sample(range(part["rows"] + 1), 2))
        planned = part | {"row_start": start, "row_end": end} | footer.list_breaks(start, end)
        planned["row_end"] = short = dice.randint(start + 1, end)  # by a barrier of another source
        shares = divide_part(store, planned, source)
        rows = []
        for share in shares:
            read.clear()
            rows.append(read_rows(store, share, source))
            more = sum(read) - count_read_bytes(share, source, is_open=False)
            assert more == 0 or (name == "orc" and more < 300)  # its footer
        assert pa.concat_tables(rows) == whole.slice(start, short - start)
        resumed = restore_footer(part | footer.list_breaks(short, part["rows"]))
        assert resumed.list_breaks(short, part["rows"]) == footer.list_breaks(short, part["rows"])


def test_an_object_of_an_older_plan_is_read_whole(tmp_path: Path) -> None:
    """It has no offsets; such breaks are those of row groups before a column was renamed."""
    source = spec(format="csv").sources["a"]
    part = {"key": "inbox/a/1", "etag": "e", "size": 90 << 20, "ordinal": 0, "rows": 900}
    part |= {"row_start": 0, "row_end": 900, "columns": {}, "breaks": [300, 600]}
    store = LocalStore(tmp_path)
    (own,) = divide_part(store, part, source)
    assert (own["row_start"], own["row_end"]) == (0, 900)
    assert count_read_bytes(own, source, is_open=False) == part["size"]
    more = {"breaks": [0, 300, 600], "offsets": [20, 30 << 20, 60 << 20]}
    assert len(divide_part(store, part | more, source)) == 3
    # Its rows had other numbers when it was planned.
    bare = spec(format="csv", parse={"header": False}).sources["a"]
    assert len(divide_part(store, part | more, bare)) == 1


def test_an_object_that_only_the_last_share_finds_damaged_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine makes one dead letter of all its rows in the cut, as if one task had read it."""
    use_chunks(monkeypatch, 200)
    data, options = make_object("avro-null")
    store, source = LocalStore(tmp_path), spec(**options).sources["a"]
    part = plan_object(store, "1", data, source)
    assert part is not None
    *others, last = divide_part(store, part, source)
    path = store.local_path(part["key"])
    assert path is not None
    path.write_bytes(data[:-1] + b"x")
    for share in others:
        read_rows(store, share, source)
    with pytest.raises(CorruptObjectsError) as caught:
        read_rows(store, last, source)
    assert caught.value.keys == (part["key"],)


QUOTED = "at,item,amount\n" + '2026-03-01T00:00:00Z,"b\nc",5\n' * 60


def open_csv(store: LocalStore, folder: Path, **parse: Any) -> ObjectSource:
    """A source of CSV with these options, whose objects are inspected as tasks do it."""
    pipeline = spec(format="csv", parse=parse)
    source, view = pipeline.sources["a"], InputView(store, pipeline, folder)

    def inspect(_: str, entries: Any, locate: Any) -> list[Any]:
        """Look at objects."""
        objects = [FoundObject(one.key, locate(one.key), one.size) for one in entries]
        units = divide_objects(source, objects)
        return [found for unit in units for found in describe_unit(unit).found]

    view.let_tasks_inspect(inspect)
    return ObjectSource("a", source, view)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("change", ["quote", "header", "delimiter"])
def test_an_object_is_read_to_its_end_as_it_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, is_shared: bool
) -> None:
    """Other options of CSV are for the objects behind it: its rows would have other numbers."""
    use_chunks(monkeypatch, 100 if is_shared else 1 << 20)
    options: dict[str, tuple[JsonObject, JsonObject]] = {
        "quote": ({"quote": "'"}, {}),
        "header": ({}, {"header": False}),
        "delimiter": ({}, {"delimiter": ";"}),
    }
    old, new = options[change]
    store = LocalStore(tmp_path / "store")
    store.put("inbox/a/1.csv", QUOTED.encode())
    store.put("inbox/a/2.csv", QUOTED.encode())
    begun, changed = open_csv(store, tmp_path / "1", **old), open_csv(store, tmp_path / "2", **new)
    whole = begun.plan(Member("a"), None, ReadLimits(objects=1))
    first = begun.plan(Member("a"), None, ReadLimits(rows=20))
    second = changed.plan(Member("a"), first.resume, ReadLimits(rows=10))
    third = changed.plan(Member("a"), second.resume, ReadLimits(objects=1))
    shares = [
        *((begun, part) for part in divide_part(store, first.parts[0], begun.spec)),
        *((changed, part) for part in divide_part(store, second.parts[0], changed.spec)),
        *((changed, part) for part in divide_part(store, third.parts[0], changed.spec)),
    ]
    assert (len(shares) > 5) == is_shared
    found = pa.concat_tables([read_rows(store, part, source.spec) for source, part in shares])
    assert found == read_rows(store, whole.parts[0], begun.spec)
    last = changed.plan(Member("a"), third.resume, ReadLimits(objects=1))
    assert all("framing" not in part for part in last.parts), "the next one has the new options"


def test_a_slice_that_is_cut_short_leaves_the_breaks_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its next reader would decode the object to its end."""
    use_chunks(monkeypatch, 100)
    store = LocalStore(tmp_path / "store")
    store.put("inbox/a/1.csv", QUOTED.encode())
    source = open_csv(store, tmp_path / "1")
    planned = source.plan(Member("a"), None, ReadLimits(rows=20))
    trimmed = source.trim(planned, join_seq(0, 5))
    assert trimmed.resume == source.plan(Member("a"), None, ReadLimits(rows=5)).resume
    assert trimmed.resume is not None
    assert len(trimmed.resume["open"]["breaks"]) > 10
