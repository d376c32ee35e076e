"""Sums of whole numbers: exact in state, and null and counted where their column does not hold them.

State stays what versions read that keep such a sum in one `bigint`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.spark.agreement import SECOND, Pair, spec_of
from tidegate.checkpoints.manifest import FileRef
from tidegate.time_units import TICK_MAX

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark]

_AGGREGATES = {"rows": "count(*)", "total": "sum(n)"}
_SHAPES: dict[str, dict[str, Any]] = {
    "tumbling": {"kind": "tumbling", "size": "10s"},
    "session": {"kind": "session", "gap": "10s"},
}


def _world(session: SparkSession, folder: Path, kind: str) -> Pair:
    window = {**_SHAPES[kind], "keys": ["k"], "aggregates": _AGGREGATES}
    return Pair(spec_of({"a": {}}, windows={"w": window}), session, folder)


def _put(pair: Pair, numbers: dict[str, int | None]) -> None:
    times = {"t": SECOND, "kind": "data", "v": None}
    pair.put("a", [{**times, "k": key, "n": number} for key, number in numbers.items()])
    pair.run(SECOND)


def _totals(pair: Pair) -> dict[str, int | None]:
    pair.run(100 * SECOND, done=True)
    return {row["k"]: row["total"] for row in pair.table("w")}


@pytest.mark.parametrize("kind", _SHAPES)
@pytest.mark.parametrize("most", [500_000, 1], ids=["driver", "tasks"])
def test_a_sum_that_overflows_ends_no_pipeline(
    session: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    most: int,
) -> None:
    """It is null and counted, and comes back when later rows bring it into its range again."""
    monkeypatch.setattr("tidegate.jobs.spark.state_merging.MERGE_ROWS", most)
    pair = _world(session, tmp_path, kind)
    _put(pair, {"over": TICK_MAX, "back": TICK_MAX, "plain": 1, "none": None})
    _put(pair, {"over": 1, "back": 1, "plain": 2, "none": None})
    _put(pair, {"back": -TICK_MAX})
    assert _totals(pair) == {"over": None, "back": 1, "plain": 3, "none": None}
    moved = pair.sides["spark"].moved
    assert [move.counters.overflowed for move in moved] == [{}, {}, {}, {"w": 1}]


def _rewrite_as_before(pair: Pair, ref: FileRef) -> FileRef:
    """A segment as versions wrote it that know no sum beyond `bigint`."""
    path = pair.store.local_path(ref.key)
    assert path is not None
    rows = pq.read_table(path, partitioning=None)
    assert rows.schema.field("_s1").type == pa.int64()
    assert rows["_s1"].null_count == rows["_s1_over"].length() - rows["_s1_over"].null_count
    pq.write_table(rows.drop_columns("_s1_over"), path)
    return ref.model_copy(update={"sha256": ""})


@pytest.mark.parametrize("kind", _SHAPES)
@pytest.mark.parametrize("most", [500_000, 1], ids=["driver", "tasks"])
def test_state_of_older_versions_goes_on(
    session: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    most: int,
) -> None:
    """Also beside state of this version, and where the sum overflows only now."""
    monkeypatch.setattr("tidegate.jobs.spark.state_merging.MERGE_ROWS", most)
    pair = _world(session, tmp_path, kind)
    _put(pair, {"over": TICK_MAX, "plain": 1})
    side = pair.sides["spark"]
    side.segments = tuple(
        _rewrite_as_before(pair, ref) if "aggregates" in ref.extra else ref for ref in side.segments
    )
    _put(pair, {"over": 1, "plain": 2})
    _put(pair, {"plain": 3})
    assert _totals(pair) == {"over": None, "plain": 6}
