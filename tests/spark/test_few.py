"""What the driver merges by itself, without Spark."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tests.spark.agreement import SECOND, spec_of
from tidegate.jobs.spark.aggregates import Aggregation
from tidegate.jobs.spark.merge_in_driver import can_merge_in_driver, merge_due_results
from tidegate.time_units import TICK_MAX

pytestmark = pytest.mark.unit

STATE = {
    "_ws": pa.int64(),
    "_we": pa.int64(),
    "_k0": pa.string(),
    "_on": pa.int32(),
    "_up": pa.int32(),
    "_n": pa.int32(),
    "_epoch": pa.int64(),
    "_s0": pa.int64(),
    "_s1": pa.float64(),
    "_new": pa.bool_(),
}


def aggregation(**more: Any) -> Aggregation:
    """A count and a sum per key in windows of 10 s, or what is given instead."""
    window = {
        "kind": "tumbling",
        "size": "10s",
        "keys": ["k"],
        "aggregates": {"rows": "count(*)", "total": "sum(v)"},
        **more,
    }
    return Aggregation(spec_of(windows={"w": window}), "w")


def partials(*rows: tuple[Any, ...]) -> pa.Table:
    """State: rows of (window start in s, key, open then, update, epoch, count, sum, new)."""
    full = [
        (s * SECOND, (s + 10) * SECOND, k, on, up, 1, epoch, n, v, new)
        for s, k, on, up, epoch, n, v, new in rows
    ]
    columns = [pa.array([row[i] for row in full], kind) for i, kind in enumerate(STATE.values())]
    return pa.table(columns, schema=pa.schema(list(STATE.items())))


def test_windows_that_close_or_changed_have_one_result_each() -> None:
    """Partials of several epochs become one result.

    A closed window that was touched has a revision; open ones wait.
    """
    rows = partials(
        (0, "x", 1, 0, 1, 2, 1.5, False),
        (0, "x", 0, 1, 3, 1, 0.5, True),
        (0, "y", 1, 0, 1, 7, None, False),
        (10, None, 1, 0, 2, 1, None, False),
        (10, None, 1, 0, 3, 1, None, True),
        (20, "x", 1, 0, 3, 9, 9.0, True),
    )
    found = merge_due_results(
        aggregation(lateness="30s"), rows, before=12 * SECOND, after=25 * SECOND, timeline=0, slot=3
    )
    assert found is not None
    told = {(row["k"], row["window_start"].timestamp()): row for row in found.to_pylist()}
    assert {key: (row["revision"], row["rows"], row["total"]) for key, row in told.items()} == {
        ("x", 0.0): (1, 3, 2.0),
        (None, 10.0): (0, 2, None),
    }
    assert {(row["_timeline"], row["_epoch"], row["replaces"]) for row in told.values()} == {
        (0, 3, None)
    }


def test_a_purged_window_has_no_result() -> None:
    """State of a window that is purged counts for nothing, whoever keeps its segment."""
    rows = partials((0, "x", 1, 0, 1, 2, 1.0, False), (0, "x", 0, 1, 3, 1, 1.0, True))
    found = merge_due_results(
        aggregation(), rows, before=12 * SECOND, after=25 * SECOND, timeline=0, slot=3
    )
    assert found is not None
    assert found.num_rows == 0


def test_a_sum_that_may_overflow_is_left_to_spark() -> None:
    """Arrow's sums wrap around; Spark's fail, and name the overflow."""
    rows = partials((0, "x", 1, 0, 1, TICK_MAX - 1, 1.0, False), (0, "x", 1, 0, 2, 2, 1.0, True))
    assert (
        merge_due_results(aggregation(), rows, before=0, after=25 * SECOND, timeline=0, slot=3)
        is None
    )


@pytest.mark.parametrize(
    ("more", "kinds", "expected"),
    [
        ({}, {}, True),
        ({"revisions": "delta"}, {}, False),
        ({"zero_rows": True}, {}, False),
        ({}, {"_k0": pa.float64()}, False),
        ({}, {"_s1": pa.decimal128(20, 2)}, False),
        (
            {"aggregates": {"low": "min(n)", "high": "max(t)"}},
            {"_s1": pa.timestamp("us", "UTC")},
            True,
        ),
        ({"aggregates": {"rows": "count(*)", "high": "max(v)"}}, {}, False),
        ({"aggregates": {"rows": "count(*)", "all": "collect(v)"}}, {}, False),
    ],
)
def test_only_what_merges_exactly_is_merged(
    more: dict[str, Any], kinds: dict[str, Any], expected: bool
) -> None:
    """Decimals grow, floats compare by their own rules in Spark (NaN, -0.0), lists have no bound.

    These stay Spark's.
    """
    assert (
        can_merge_in_driver(aggregation(**more), pa.schema(list({**STATE, **kinds}.items())))
        is expected
    )
