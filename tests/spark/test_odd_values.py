"""Values that Parquet allows and no table holds cost their rows, whoever reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from tests.rows.odd_columns import text_of
from tests.spark.agreement import SECOND, Pair, spec_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark]

_SCHEMA = {"t": "timestamp", "k": "string", "x": "timestamp"}
ONLY_SPARK = "t is not null -- a comment, which DuckDB is not given"
_TICKS = [0, 1, 2, 3]


def _times(numbers: list[int], unit: str = "us", zone: str | None = "UTC") -> Any:
    return pa.array(numbers, pa.int64()).cast(pa.timestamp(unit, zone))


def _run(pair: Pair, columns: dict[str, Any]) -> list[int]:
    """An epoch over one object; the numbers of its dead rows."""
    pair.put("a", pa.table({"t": _times([n * SECOND for n in _TICKS]), **columns}))
    pair.run(SECOND)
    dead = pair.table("dead_letters")
    assert {row["reason"] for row in dead} == {"bad_value"}
    return sorted(row["_seq"] for row in dead)


@pytest.mark.parametrize("where", [None, ONLY_SPARK], ids=["duckdb", "spark"])
@pytest.mark.parametrize("kind", ["text", "far", "local"])
def test_an_odd_value_costs_its_row(
    session: SparkSession, tmp_path: Path, kind: str, where: str | None
) -> None:
    """A text that is not UTF-8, a time beyond microseconds, a local time that is skipped.

    Of a local time that occurs twice the earlier instant is meant.
    """
    source = {"schema": _SCHEMA, "timezone": "Europe/Berlin", "where": where}
    pair = Pair(spec_of({"a": source}), session, tmp_path)
    texts, times = pa.array(["a", "b", "c", "d"]), _times([0] * 4)
    half_past_two = [1_711_852_200, 1_729_996_200]  # in Berlin: skipped, and twice
    odd = {
        "text": {"k": text_of(b"a", b"caf\xe9", b"c", b"\xff"), "x": times},
        "far": {"k": texts, "x": _times([0, 10**17, 1, -(10**17)], "ms")},
        "local": {
            "k": texts,
            "x": _times([0, half_past_two[0], half_past_two[1], half_past_two[0]], "s", None),
        },
    }
    assert _run(pair, odd[kind]) == [1, 3]
    pair.run(100 * SECOND, done=True)
    events = pair.table("events")
    assert [row["_seq"] for row in events] == [0, 2]
    if kind == "local":
        assert events[1]["x"].timestamp() == half_past_two[1] - 7200
