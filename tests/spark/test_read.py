"""Rows of a slice: which ones, and what happens when they cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.rows.topic_messages import spec_of
from tidegate.jobs.engine.interfaces import Cut, Slice
from tidegate.jobs.eventtime.decider import create_initial_state
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows.member_scan import MemberScan
from tidegate.jobs.rows.slice_reading import CutPart
from tidegate.jobs.rows.slice_scan import keep_data_rows, scan_slice
from tidegate.jobs.sources.kafka_source import KafkaSource
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits


class Held:
    """A topic of one partition, whose first 50,000 offsets are read already."""

    def read_offsets(self, *, settled: bool = True) -> dict[int, tuple[int, int]]:
        return {0: (0, 50_100)}

    def read_topic_id(self) -> None:
        return None


def piece() -> Slice:
    """Offsets 50,000 to 50,100."""
    source = KafkaSource("web", spec_of(), Held())
    source.list_members()
    return source.plan(Member("web", "0"), {"offset": 50_000}, ReadLimits())


def test_rows_of_a_range_that_begins_anywhere(tmp_path: Path) -> None:
    """The rows of a range far from the topic's beginning keep their offsets, of which compaction
    took some.
    """
    spec = PipelineSpec.model_validate(
        {"name": "p", "sources": {"web": spec_of().model_dump(by_alias=True, exclude_unset=True)}}
    )
    cut = Cut((piece(),))
    (planned,) = cut.slices[0].parts
    offsets = pa.array([50_000, 50_001, 50_004, 50_007, 50_008, 50_099], pa.int64())
    file = tmp_path / "staged"
    times = pa.array(np.arange(6), pa.timestamp("us", "UTC"))
    nothing = {
        name: pa.nulls(6, pa.type_for_alias(kind))
        for name, kind in {"_why": "string", "_text": "string"}.items()
    }
    known = {"at": times, "n": pa.array(np.arange(6)), "_at": offsets, **nothing}
    texts = {name: pa.nulls(6, pa.string()) for name in ("who", "origin")}
    own = {"sent": pa.nulls(6, times.type), "price": pa.nulls(6, pa.decimal128(6, 2))}
    pq.write_table(pa.table({**known, **texts, **own}), file)
    fields = ("key", "etag", "ordinal", "rows", "row_start", "row_end")
    part = CutPart(
        member=0,
        path=file,
        columns=tuple(planned["columns"].items()),
        **{name: planned[name] for name in fields},
    )
    _, found = scan_slice(spec, cut, [part], 0, create_initial_state(spec))
    assert found["_seq"].to_pylist() == offsets.to_pylist()
    assert found["n"].to_pylist() == list(range(6))


def scan_object(folder: Path, table: pa.Table, **source: Any) -> tuple[MemberScan, pa.Table]:
    """What a task finds in one object of a source, and its rows."""
    base = {"event_time": "t", "lag": "1s", "path": "inbox", **source}
    spec = PipelineSpec.model_validate({"name": "p", "sources": {"a": base}})
    pq.write_table(table, folder / "object")
    columns = tuple((field.name, str(field.type)) for field in table.schema)
    rows = table.num_rows
    part = CutPart(0, "inbox/object", "etag", 0, rows, 0, rows, folder / "object", columns)
    cut = Cut((Slice(Member("a"), 0, rows),))
    return scan_slice(spec, cut, [part], 0, create_initial_state(spec))


@pytest.mark.parametrize(("marks", "kind"), [([None, 1], "1"), ([None, True], "true")])
def test_the_column_of_kinds_may_have_any_type(tmp_path: Path, marks: list[Any], kind: str) -> None:
    """Null marks data then, and the text of another value is a type of barriers."""
    rows = pa.table({"t": pa.array([1, 2], pa.timestamp("us", "UTC")), "mark": pa.array(marks)})
    schema = {"t": "timestamp", "mark": "long" if kind == "1" else "boolean"}
    barriers = {"kind": "mark", "types": [kind]}
    found = scan_object(tmp_path, rows, schema=schema, barriers=barriers)[0].survey
    assert found.rows == 1
    assert found.barrier is not None
    assert found.barrier.type == kind


def test_nested_columns_that_nothing_names_need_no_jvm(tmp_path: Path) -> None:
    """The schema has to name all columns of an object, and `at` is a word of DuckDB."""
    rows = pa.table(
        {
            "at": pa.array([1, 2], pa.timestamp("us", "UTC")),
            "n": [1, 0],
            "who": [{"name": "x"}, None],
            "tags": [["a"], None],
        }
    )
    nested = {"who": "struct<name: string>", "tags": "array<string>"}
    found, own = scan_object(
        tmp_path,
        rows,
        schema={"at": "timestamp", "n": "long", **nested},
        select={"t": "at", "n": "n"},
        where="n > 0",
    )
    assert (found.survey.rows, found.survey.dead) == (1, 1)
    data = keep_data_rows(own).select(["t", "n"])
    assert data.equals(rows.select(["at", "n"]).rename_columns(["t", "n"])[:1])
