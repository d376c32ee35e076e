"""Objects in a local folder, whose disk may not answer, and which may be written in place."""

from __future__ import annotations

import errno
import gc
import hashlib
import io
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest

from tests.sources.encoded_objects import SCHEMA, WHOLE, written
from tests.spark.agreement import spec_of
from tidegate.errors import TidegateError, TransientError
from tidegate.jobs.engine.arrow_tables import replace_column
from tidegate.jobs.engine.errors import CorruptObjectsError
from tidegate.jobs.rows.object_reading import (
    FoundObject,
    LocalFile,
    describe_unit,
    divide_objects,
    open_part,
)
from tidegate.jobs.rows.slice_reading import CutPart, read_parts
from tidegate.jobs.sources.byte_streams import ScratchFile
from tidegate.jobs.sources.object_inspection import Footer, InspectedObject
from tidegate.jobs.spec.source_spec import SourceSpec
from tidegate.json_types import JsonObject


class FailingFile(io.FileIO):
    """A file whose disk answers only so many reads."""

    def __init__(self, path: Path, answers: int) -> None:
        super().__init__(path)
        self.left = answers

    def _answer(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def readinto(self, buffer: Any) -> Any:
        self._answer()
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self._answer()
        return super().readall()


def source_of(form: str) -> SourceSpec:
    """A source whose objects are decoded, Parquet too."""
    old = {"evolution": {"renamed": {"older": "item"}}, "format": form}
    more: JsonObject = {"schema": SCHEMA, "event_time": "at", **old}
    return spec_of({"a": more}, windows={}).sources["a"]


def write_long_orc(rows: pa.Table, sink: io.BytesIO) -> None:
    """Two stripes, each longer than what is read at once."""
    rows = pa.concat_tables([rows] * 2000)
    noise = pa.array([os.urandom(12).hex() for _ in range(rows.num_rows)])
    orc.write_table(replace_column(rows, "item", noise), sink, stripe_size=1, batch_size=3000)


def inspect(path: Path, source: SourceSpec) -> InspectedObject:
    """Look at a file as a task does."""
    (unit,) = divide_objects(source, [FoundObject(path.name, str(path), path.stat().st_size)])
    (found,) = describe_unit(unit).found
    if isinstance(found, TidegateError):
        raise found
    return found


def fail_each_read(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[], object]
) -> tuple[list[str], object]:
    """Let the disk fail at the first read, then at the second and so on.

    Returns:
        The codes of these errors, and the result without one.
    """
    codes: list[str] = []

    def open_failing(path: Path, _: str) -> io.BufferedReader:
        return io.BufferedReader(FailingFile(path, len(codes)))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_failing)
        while True:
            try:
                return codes, read()
            except TransientError as error:
                codes.append(error.code)


@pytest.mark.parametrize("name", WHOLE)
def test_a_disk_that_does_not_answer_is_no_fault_of_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The error is transient, whichever read it is, to inspect the object or to read its rows."""
    form, data = WHOLE[name]
    if form == "orc":  # one whose parts are read one by one
        data = written(write_long_orc)
    path, source = tmp_path / name, source_of(form)
    path.write_bytes(data)
    codes, found = fail_each_read(monkeypatch, partial(inspect, path, source))
    assert len(codes) > 1
    assert isinstance(found, InspectedObject)
    assert isinstance(found.content, Footer)
    assert found.etag == hashlib.sha256(data).hexdigest()
    part: JsonObject = {"key": name, "etag": found.etag, "size": len(data), "ordinal": 0}
    rows = found.content.rows
    part |= {"rows": rows, "row_start": 0, "row_end": rows, "columns": found.content.columns}
    more, _ = fail_each_read(monkeypatch, lambda: open_part(0, part, str(path), source))
    assert more
    assert {*codes, *more} == {"store.unavailable"}
    path.unlink()
    with pytest.raises(CorruptObjectsError):
        open_part(0, part, str(path), source)


@pytest.mark.parametrize("end", [5000, 4000])
def test_a_disk_that_does_not_answer_is_no_fault_of_plain_parquet(tmp_path: Path, end: int) -> None:
    """Whichever read it is, of all rows and of some; a dead letter would take its rows away."""
    path, source = tmp_path / "1.parquet", source_of("parquet")
    rows = pa.table({"item": ["é"] * 5000, "amount": list(range(5000))})
    pq.write_table(rows, path, row_group_size=1000)
    columns = (("item", "string"), ("amount", "int64"))
    part = CutPart(0, "1.parquet", "e", 0, 5000, 0, end, path, columns)
    codes, found = list[str](), None
    while found is None:
        with io.BufferedReader(FailingFile(path, len(codes))) as file:
            try:
                found = read_parts(columns, [(0, replace(part, path=file))], source)
            except TransientError as error:
                codes.append(error.code)
    assert set(codes) == {"store.unavailable"}
    assert found.select(["item", "amount"]) == rows.slice(0, end)
    with pytest.raises(CorruptObjectsError):
        read_parts(columns, [(0, replace(part, path=tmp_path / "gone.parquet"))], source)


def test_a_name_that_arrow_does_not_open_is_read_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk may fail as well, and the file may be gone."""
    path, uri = tmp_path / "a\\b.parquet", str(tmp_path / "a%5Cb.parquet")
    source = spec_of({"a": {}}, windows={}).sources["a"]
    rows = pa.table({"n": pa.array(range(5000), pa.int32())})
    with path.open("wb") as sink:
        pq.write_table(rows, sink)
    columns = (("n", "int32"),)
    size = path.stat().st_size
    part: JsonObject = {"key": "a%5Cb.parquet", "etag": "e", "size": size, "ordinal": 0}
    part |= {"rows": 5000, "row_start": 0, "row_end": 5000, "columns": dict(columns)}

    def read() -> pa.Table:
        """Open the object and read its rows."""
        return read_parts(columns, [(0, open_part(0, part, uri, source))], source)

    codes, found = fail_each_read(monkeypatch, read)
    assert set(codes) == {"store.unavailable"}
    assert isinstance(found, pa.Table)
    assert found.select(["n"]) == rows
    path.unlink()
    with pytest.raises(CorruptObjectsError):
        read()


def test_a_file_that_is_written_in_place_is_inspected_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the plan would have the ETag of what was there before, with the rows of now."""
    path, source = tmp_path / "1.json", source_of("json")
    path.write_bytes(b"{}\n")
    digest = hashlib.file_digest

    def write_after(file: Any, name: str) -> Any:
        """What is there is digested, then more is written."""
        found = digest(file, name)
        with path.open("ab") as more:
            more.write(b"{}\n")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", write_after)
        with pytest.raises(TransientError) as failed:
            inspect(path, source)
    assert failed.value.code == "source.changed"
    assert str(path) in failed.value.message
    content = inspect(path, source).content
    assert isinstance(content, Footer)
    assert content.rows == 2


def test_a_file_that_cannot_be_opened_leaves_nothing_to_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python closes what it collects, and since 3.13 it says if that fails."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(TransientError):
        ScratchFile()
    with pytest.raises(TidegateError):
        LocalFile(tmp_path / "gone")
    gc.collect()  # warnings are errors
