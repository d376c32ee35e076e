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


@pytest.mark.parametrize(
    ("native", "small"), [(True, None), (False, None), (False, 0)], ids=["driver", "few", "many"]
)
@pytest.mark.parametrize("kind", ["text", "far", "local"])
def test_an_odd_value_costs_its_row(
    session: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    native: bool,
    small: int | None,
) -> None:
    """A text that is not UTF-8, a time beyond microseconds, a local time that is skipped.

    Of a local time that occurs twice the earlier instant is meant.
    """
    if small is not None:
        monkeypatch.setattr("tidegate.jobs.spark.spark_session.SMALL_ROWS", small)
    source = {"schema": _SCHEMA, "timezone": "Europe/Berlin"}
    pair = Pair(spec_of({"a": source}), session, tmp_path, native=native)
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


def test_spark_reads_good_times_of_milliseconds(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only objects with a time that is too far, or that say nothing of theirs, take the other way."""
    from tidegate.jobs.spark import cut_reader

    monkeypatch.setattr("tidegate.jobs.spark.spark_session.SMALL_ROWS", 0)
    monkeypatch.delattr(cut_reader, "read_parts")
    pair = Pair(spec_of({"a": {"schema": _SCHEMA}}), session, tmp_path, native=False)
    times = {"t": _times(_TICKS, "ms"), "x": pa.nulls(4, pa.timestamp("ms", "UTC"))}
    pair.put("a", pa.table({**times, "k": ["a"] * 4}))
    pair.run(SECOND, done=True)
    assert len(pair.table("events")) == 4
