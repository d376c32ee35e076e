"""What a frame in DuckDB knows of its types."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidegate.jobs.rules import duck_frame
from tidegate.jobs.rules.duck_frame import DuckFrame, query_table

pytestmark = pytest.mark.unit


def test_types_are_asked_once_for_each_shape() -> None:
    """Another table with the same columns needs no query; one with other types has its own."""
    numbers, texts = pa.table({"v": [1, 2], "_table_1": [1, 1]}), pa.table({"v": ["a"]})
    first = DuckFrame.from_table(numbers).selectExpr("v", "_table_1").types
    asked = duck_frame._describe_query.cache_info().misses
    again = DuckFrame.from_table(numbers.slice(1)).selectExpr("v", "_table_1").types
    assert duck_frame._describe_query.cache_info().misses == asked
    assert first == again == {"v": "BIGINT", "_table_1": "BIGINT"}
    assert DuckFrame.from_table(texts).selectExpr("v").types == {"v": "VARCHAR"}
    both = DuckFrame.from_table(numbers).unionByName(DuckFrame.from_table(texts))
    assert both.types["v"] == "VARCHAR"


def test_a_query_over_no_rows_is_planned_once() -> None:
    """Its result depends on the query and the columns alone."""
    none = pa.table({"v": pa.array([], pa.int64())})
    query = "SELECT v + 1 AS next_of_none FROM rows"
    first, asked = query_table(none, query), duck_frame._query_no_rows.cache_info().misses
    assert query_table(none, query) is first
    assert duck_frame._query_no_rows.cache_info().misses == asked
    assert query_table(pa.table({"v": [1]}), query)["next_of_none"].to_pylist() == [2]
    with_texts = pa.table({"v": pa.array([], pa.string())})
    assert query_table(with_texts, "SELECT v FROM rows").schema.field("v").type == pa.string()
