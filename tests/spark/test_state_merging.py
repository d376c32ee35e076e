"""How many tasks merge the state of a window."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pytest

from tests.spark.agreement import SECOND, spec_of
from tidegate.jobs.rows.stored_partials import StoredTable, encode_table
from tidegate.jobs.spark import mover
from tidegate.jobs.spark.state_merging import StateMerging
from tidegate.time_units import TICK_MAX, TICK_MIN

pytestmark = pytest.mark.unit

LAST = 400_000 * 10 * SECOND
WINDOW = {"kind": "tumbling", "size": "10s", "keys": ["k"], "aggregates": {"n": "count(*)"}}


def count_buckets(
    part: bytes | StoredTable,
    live_rows: int = 0,
    live_bytes: int = 0,
    frontiers: tuple[int, int] = (0, 0),
    **window: Any,
) -> int:
    """Tasks that merge one part and a live segment; 0: the driver does."""
    segment = SimpleNamespace(rows=live_rows, bytes=live_bytes)
    spec = spec_of(windows={"w": {**WINDOW, **window}})
    decision = SimpleNamespace(frontier_before=frontiers[0], frontier_after=frontiers[1])
    epoch: Any = SimpleNamespace(spec=spec, live_segments=lambda _: [segment], decision=decision)
    return StateMerging(epoch, {"w": (part,)})._count_buckets("w", "window:w")


def test_few_large_rows_are_merged_by_tasks() -> None:
    """The memory of the driver is bounded by bytes as well as by rows (core-C12)."""
    few = encode_table(pa.table({"k": ["x", "y"]}))
    large = encode_table(pa.table({"k": [os.urandom(9 << 20), os.urandom(9 << 20)]}))
    assert count_buckets(few) == 0
    assert count_buckets(large) == 3
    assert count_buckets(few, live_bytes=17 << 20) == 3


def test_many_rows_are_merged_by_tasks() -> None:
    """So are those that tasks have put into the store, and rows that `sql(...)` keeps."""
    few = encode_table(pa.table({"k": ["x", "y"]}))
    assert count_buckets(few, live_rows=500_000) == 2
    assert count_buckets(StoredTable("key", 5, 5)) == 1
    assert count_buckets(few, aggregates={"middle": "sql(percentile(v, 0.5))"}) == 1


@pytest.mark.parametrize("before", [0, TICK_MIN])
@pytest.mark.parametrize("after", [LAST, TICK_MAX])
def test_windows_without_rows_are_merged_by_tasks(before: int, after: int) -> None:
    """`zero_rows` adds them; in a first and in a last epoch as many as lie between the rows."""
    far = encode_table(pa.table({"k": ["x", "x"], "_ws": [0, LAST]}))
    assert count_buckets(far, frontiers=(before, after)) == 0
    assert count_buckets(far, frontiers=(before, after), zero_rows=True) == 2


def test_a_release_that_fails_waits_for_the_merge_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next epoch must not meet a thread that still writes files of this one."""
    begun, failed, ended = Event(), Event(), list[str]()

    def merge() -> dict[str, Any]:
        begun.set()
        assert failed.wait(60)
        ended.append("merge")
        return {}

    def fail(*_: Any) -> None:
        assert begun.wait(60)
        failed.set()
        raise RuntimeError("no executor")

    monkeypatch.setattr(mover, "read_late_rows", lambda _, scans, __: scans)
    monkeypatch.setattr(mover, "release_in_tasks", fail)
    scans, merging, epoch = MagicMock(answers=[]), MagicMock(merge_windows=merge), MagicMock()
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match="no executor"):
            mover._write_outputs(epoch, scans, merging, pool)
        assert ended == ["merge"]
