"""`outputs.layout`: what it may say, and what is said about the rest."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.table_layout import PartitionBy, PartitionTransform

COLUMNS = {
    "t": "timestamp",
    "day": "date",
    "k": "string",
    "n": "long",
    "v": "double",
    "d": "decimal(9,2)",
    "b": "boolean",
}
TYPES = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}


def spec(layout: dict[str, Any], **outputs: Any) -> PipelineSpec:
    """A pipeline with every kind of table."""
    return PipelineSpec.model_validate(
        {
            "name": "p",
            "sources": {"a": {"path": "in", "schema": COLUMNS, "event_time": "t", "lag": "1s"}},
            "release": {"glom": {"dt": "1s"}},
            "windows": {
                "hourly": {
                    "kind": "tumbling",
                    "size": "1h",
                    "keys": ["k"],
                    "aggregates": {"c": "count(*)"},
                }
            },
            "streams": {"copies": {}},
            "pipes": {"copy": {"origin": "events", "to": "copies"}},
            "outputs": {"layout": layout, **outputs},
        }
    )


def test_partitions_are_read() -> None:
    """Each form says a column, what is taken of it, and how wide."""
    given = spec(
        {
            "events": {
                "partition_by": ["day(t)", "bucket( 16 , k )", "n"],
                "sort_by": ["k", "t desc", "n asc"],
            }
        }
    )
    layout = given.outputs.layout["events"]
    assert layout.partition_fields == (
        PartitionBy("t", PartitionTransform.DAY),
        PartitionBy("k", PartitionTransform.BUCKET, 16),
        PartitionBy("n"),
    )
    assert [(key.column, key.descending) for key in layout.sort_fields] == [
        ("k", False),
        ("t", True),
        ("n", False),
    ]
    assert [str(part) for part in layout.partition_fields] == ["day(t)", "bucket(16, k)", "n"]
    assert [part.iceberg_transform for part in layout.partition_fields] == [
        "day",
        "bucket[16]",
        "identity",
    ]


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"event": {"sort_by": ["k"]}}, "no such table; there are events, late"),
        ({"events": {}}, "neither partition_by nor sort_by"),
        (
            {"events": {"partition_by": ["week(t)"]}},
            "'week\\(t\\)' is not a partition; allowed: a column, year",
        ),
        (
            {"events": {"partition_by": ["t"]}},
            "t does not go with a timestamp; allowed: year, month, day, hour, bucket",
        ),
        ({"events": {"partition_by": ["hour(day)"]}}, "hour\\(day\\) does not go with a date"),
        (
            {"events": {"partition_by": ["bucket(4, v)"]}},
            "does not go with a double; allowed: nothing: choose another column",
        ),
        (
            {"events": {"partition_by": ["truncate(2, b)"]}},
            "does not go with a boolean; allowed: identity",
        ),
        ({"events": {"partition_by": ["month(t)", "day(t)"]}}, "two times of it"),
        ({"events": {"partition_by": ["bucket(0, k)"]}}, "must be above 0"),
        (
            {"hourly": {"partition_by": ["c"]}},
            "no column 'c' to partition by; there are k, window_start",
        ),
        ({"late": {"sort_by": ["delay desc"]}}, "outputs.layout.late.sort_by: no column 'delay'"),
        ({"late": {"sort_by": ["k down"]}}, "is not a sort key"),
        ({"late": {"sort_by": ["k", "k desc"]}}, "the same column twice"),
    ],
)
def test_what_cannot_be_is_refused_by_name(layout: dict[str, Any], said: str) -> None:
    """The message says where, what and what would be allowed."""
    with pytest.raises(ValidationError, match=said):
        spec(layout)


def test_the_columns_offered_are_those_of_the_tables() -> None:
    """The table has each column that a layout may name, with the type that the rules use."""
    given = spec({})
    for table, columns in given._layout_columns().items():
        found = build_table_schema(given, table)
        for column, kind in columns.items():
            assert column in found.names, f"{table}.{column}"
            if kind in TYPES:
                assert found.field(column).type == TYPES[kind], f"{table}.{column}"


def test_where_rows_lie_is_no_part_of_what_they_are() -> None:
    """A checkpoint made under another layout is one of the same pipeline."""
    arranged = spec({"events": {"partition_by": ["day(t)"]}}, compact=False, file_mb=8)
    assert arranged.digest() == spec({}).digest()
    assert spec({}, publish_every=2).digest() != spec({}).digest()
