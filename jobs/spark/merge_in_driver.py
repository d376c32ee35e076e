"""Few partial aggregates, merged by the driver: small merges need not be a Spark job.

Takes what Arrow merges exactly as Spark SQL does: counts, sums and averages of numbers, least and
greatest whole numbers and times, under keys that compare bit by bit. Anything else, and sums that
might overflow, are Spark's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.spark.aggregates import Aggregation
from tidegate.jobs.spark.sql_conditions import mask_reached_ends
from tidegate.jobs.spec.window_specs import AggregateFunction, WindowSpec
from tidegate.time_units import TICK_MAX

MERGE_ROWS: Final = 500_000
"""Up to this many partial rows the driver merges, in a few tenths of a second.

Their states are numbers, so memory is bounded.
"""

MERGED_FLAGS: Final = {"_on": "max", "_up": "sum", "_n": "sum", "_epoch": "min"}
"""How the marks of a window are merged over epochs."""
_SUMS: Final = (AggregateFunction.COUNT, AggregateFunction.SUM, AggregateFunction.AVG)
_EXTREMES: Final = (AggregateFunction.MIN, AggregateFunction.MAX)
_TIMESTAMP: Final = pa.timestamp("us", "UTC")


def merge_due_results(
    aggregation: Aggregation, rows: pa.Table, before: int, after: int, timeline: int, slot: int
) -> pa.Table | None:
    """Results that are due of partial rows (with `_new`), in the columns of `Aggregation.results`.

    None: a sum may overflow.
    """
    window = aggregation.window
    # Windows that are not due are not merged: their partials stay as they are.
    rows = rows.filter(_mask_candidate_windows(window, rows, before, after))
    merged = merge_partial_rows(aggregation, rows, {**MERGED_FLAGS, "_new": "max"})
    if merged is None:
        return None
    merged = merged.filter(_mask_due_windows(window, merged, before, after))
    columns: dict[str, Any] = {
        key: merged[name] for name, key in zip(aggregation.keys, window.keys, strict=True)
    }
    columns |= {
        "window_start": merged["_ws"].cast(_TIMESTAMP),
        "window_end": merged["_we"].cast(_TIMESTAMP),
        "revision": _compute_revisions(window, merged, slot).cast(pa.int32()),
        "replaces": pa.nulls(merged.num_rows, pa.list_(pa.string())),
    }
    columns |= {
        output: _finalize_aggregate(merged, f"_s{index}", output, aggregation)
        for index, output in enumerate(aggregation.plans)
    }
    columns |= {
        "_timeline": pa.repeat(pa.scalar(timeline, pa.int32()), merged.num_rows),
        "_epoch": pa.repeat(pa.scalar(slot, pa.int64()), merged.num_rows),
    }
    return pa.table(columns)


def can_merge_in_driver(aggregation: Aggregation, schema: pa.Schema) -> bool:
    """Whether the driver can merge partial rows of this schema.

    Arrow's merge of these types is Spark's.
    """
    # Gaps of `zero_rows`, and revisions of other kinds, are left to Spark.
    if aggregation.window.zero_rows or aggregation.window.revisions != "accumulate":
        return False
    # Floats are no such keys: 0.0 and -0.0 are equal and differ in their bits.
    whole, bits = (
        pa.types.is_integer,
        (pa.types.is_boolean, pa.types.is_string, pa.types.is_date, pa.types.is_timestamp),
    )
    if not all(
        whole(kind) or any(is_of(kind) for is_of in bits)
        for kind in (schema.field(k).type for k in aggregation.keys)
    ):
        return False
    for output, what in aggregation.window.aggregates.items():
        kinds = [schema.field(name).type for name in aggregation.plans[output].partial]
        if what.function in _SUMS:
            right = all(pa.types.is_int64(kind) or pa.types.is_float64(kind) for kind in kinds)
        else:
            right = what.function in _EXTREMES and all(
                whole(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind)
                for kind in kinds
            )
        if not right:
            return False
    return True


def _may_overflow(aggregation: Aggregation, rows: pa.Table) -> bool:
    """Arrow's sums wrap around where Spark's fail."""
    for output, what in aggregation.window.aggregates.items():
        for name in aggregation.plans[output].partial if what.function in _SUMS else ():
            if pa.types.is_int64(rows.schema.field(name).type):
                # A bound by the greatest value: the exact sum is what might overflow.
                ends = pc.min_max(rows[name]).as_py()
                greatest = max(abs(ends["min"] or 0), abs(ends["max"] or 0))
                if greatest * rows.num_rows > TICK_MAX:
                    return True
    return False


def merge_partial_rows(
    aggregation: Aggregation, rows: pa.Table, flags: Mapping[str, str]
) -> pa.Table | None:
    """One row per window and key, of partial rows with these marks, in their types.

    None: a sum may overflow.
    """
    if _may_overflow(aggregation, rows):
        return None
    folds = dict(flags)
    for output, what in aggregation.window.aggregates.items():
        fold = what.function.value if what.function in _EXTREMES else "sum"
        folds |= dict.fromkeys(aggregation.plans[output].partial, fold)
    # One thread: sums of doubles depend on their order, and a replay must find the same.
    grouped = pa.TableGroupBy(rows, aggregation.group_columns, use_threads=False).aggregate(
        list(folds.items())
    )
    folded = [f"{column}_{fold}" for column, fold in folds.items()]
    names = [*aggregation.group_columns, *folds]
    merged = grouped.select([*aggregation.group_columns, *folded]).rename_columns(names)
    return merged.cast(pa.schema([rows.schema.field(name) for name in names]))


def _get_window_ends(rows: pa.Table) -> Any:
    return rows["_we"].to_numpy()


def _mask_candidate_windows(window: WindowSpec, rows: pa.Table, before: int, after: int) -> Any:
    """Rows of windows that are not purged and may be due."""
    ends = _get_window_ends(rows)
    keep = ~mask_reached_ends(ends, before, window.lateness)
    return pa.array(keep & mask_reached_ends(ends, after) if window.emit == "close" else keep)


def _mask_due_windows(window: WindowSpec, merged: pa.Table, before: int, after: int) -> Any:
    ends, new = _get_window_ends(merged), merged["_new"].to_numpy()
    match window.emit:
        case "each_epoch":
            return pa.array(new & (merged["_n"].to_numpy() > 0))
        case "complete":
            return pa.array(np.ones(merged.num_rows, dtype=bool))
        case _:
            return pa.array(
                mask_reached_ends(ends, after) & (new | ~mask_reached_ends(ends, before))
            )


def _compute_revisions(window: WindowSpec, merged: pa.Table, slot: int) -> Any:
    match window.emit:
        case "each_epoch":
            return pc.subtract(merged["_n"], 1)
        case "complete":
            return pc.subtract(slot, merged["_epoch"])
        case _:
            return pc.subtract(pc.add(merged["_on"], merged["_up"]), 1)


def _finalize_aggregate(merged: pa.Table, state: str, output: str, aggregation: Aggregation) -> Any:
    match aggregation.window.aggregates[output].function:
        case AggregateFunction.COUNT:
            return pc.fill_null(merged[state], 0)
        case AggregateFunction.AVG:
            count = merged[f"{state}_n"]
            return pc.if_else(
                pc.greater(count, 0),
                pc.divide(merged[f"{state}_sum"], count.cast(pa.float64())),
                None,
            )
        case _:
            return merged[state]
