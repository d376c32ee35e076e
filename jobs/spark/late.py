"""The late table: rows late for the events output and for each window, each with the frontier it missed.

Late rows have an event time below F whatever the rules, so with no row below F there is nothing to look for, and otherwise the
filter on the event time lets Parquet skip most row groups: counting what is late does not cost a second pass over the rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from tidegate.jobs.spark.epoch import Epoch
from tidegate.jobs.spark.marks import below, late_bound
from tidegate.jobs.spark.schema import quote
from tidegate.jobs.spark.windows import late_condition
from tidegate.jobs.spark.write import FETCH_ROWS, Written, fetch
from tidegate.jobs.spec.errors import PoisonError
from tidegate.jobs.spec.options import LatePolicy
from tidegate.jobs.spec.pipeline import EVENTS, LATE
from tidegate.jobs.spec.time import TICK_MAX, TICK_MIN

__all__ = ["LateRows", "write_late"]


@dataclass(frozen=True, slots=True)
class LateRows:
    """What was late.

    Attributes:
        counts: (source, output, reason, dropped) -> rows.
    """

    written: Written
    counts: Counter[tuple[str, str, str, bool]] = field(default_factory=Counter)


def write_late(epoch: Epoch) -> LateRows:
    """Write the late table of an epoch.

    Raises:
        PoisonError: a late row under ``on_late: error``, named.
    """
    frames = [frame for frame in (_events(epoch), *(_window(epoch, name) for name in epoch.spec.windows)) if frame is not None]
    if not frames:
        return LateRows(Written((), ()))
    rows = reduce(DataFrame.unionAll, frames)
    return _few(epoch, fetch(rows)) if epoch.staged.rows <= FETCH_ROWS else _many(epoch, rows)


def _events(epoch: Epoch) -> DataFrame | None:
    bound, policy = late_bound(epoch.order.decision), epoch.spec.release.on_late
    if epoch.data is None or epoch.low is None or epoch.low >= bound or policy is LatePolicy.EMIT_FLAGGED:
        return None
    late = below("_et", bound)
    if policy is LatePolicy.ADJUST:
        late = f"{late} AND _end <= {max(epoch.order.decision.frontier_before, bound)}L"
    rows = _near(epoch.data, bound).where(late)
    return _late_rows(epoch, rows, EVENTS, policy, "late_order")


def _window(epoch: Epoch, name: str) -> DataFrame | None:
    frontier, window = epoch.order.decision.frontier_before, epoch.spec.windows[name]
    if epoch.data is None or epoch.low is None or epoch.low >= frontier:
        return None
    rows = late_condition(window, _near(epoch.data, frontier), frontier)
    return _late_rows(epoch, rows, name, window.on_late, "late_window")


def _near(frame: DataFrame, bound: int) -> DataFrame:
    """Let Parquet skip what is not below the bound."""
    return frame if bound in (TICK_MIN, TICK_MAX) else frame.where(f"_time < timestamp_micros({bound}L)")


def _late_rows(epoch: Epoch, rows: DataFrame, output: str, policy: LatePolicy, reason: str) -> DataFrame:
    if policy is LatePolicy.ERROR:
        _refuse(epoch, rows, output)
    reason = "rejected" if policy is LatePolicy.REJECT_TO_ORIGIN else reason
    return rows.selectExpr(
        *(quote(c) for c in epoch.spec.columns),
        f"'{output}' AS output",
        f"'{reason}' AS reason",
        *_missed(epoch.order.decision.frontier_before),
        *epoch.provenance(),
        f"{str(policy is LatePolicy.DROP).lower()} AS _dropped",
    )


def _missed(frontier: int) -> list[str]:
    if frontier == TICK_MIN:
        return ["CAST(NULL AS bigint) AS lateness_us", "CAST(NULL AS timestamp) AS frontier"]
    lateness = f"CAST(least(CAST({frontier} AS decimal(20,0)) - _et, {TICK_MAX}) AS bigint) AS lateness_us"
    return [lateness, f"timestamp_micros({frontier}L) AS frontier"]


def _refuse(epoch: Epoch, rows: DataFrame, output: str) -> None:
    found = fetch(rows.select("_source", "_partition", "_seq", "_et").limit(1)).to_pylist()
    if found:
        row, frontier = found[0], epoch.order.decision.frontier_before
        raise PoisonError(
            f"{row['_source']}/{row['_partition']} row {row['_seq']}: event time {row['_et']} is late for {output} "
            f"(frontier {frontier}), and on_late is error",
            code="row.late",
            pipeline=epoch.spec.name,
            kept="everything sealed so far",
            advice="choose another on_late policy, or mend the source",
        )


_COUNTED = ["_source", "output", "reason", "_dropped"]


def _counts(table: pa.Table) -> Counter[tuple[str, str, str, bool]]:
    grouped = table.select(_COUNTED).group_by(_COUNTED).aggregate([([], "count_all")])
    return Counter({(r["_source"], r["output"], r["reason"], r["_dropped"]): r["count_all"] for r in grouped.to_pylist()})


def _few(epoch: Epoch, table: pa.Table) -> LateRows:
    kept = table.filter(pc.invert(table["_dropped"])).drop_columns(["_dropped"])
    return LateRows(epoch.writer.table(LATE, kept, _time(epoch)), _counts(table))


def _many(epoch: Epoch, rows: DataFrame) -> LateRows:
    written = epoch.writer.table(LATE, rows.where("NOT _dropped").drop("_dropped"), _time(epoch))
    table = written.read(_COUNTED[:3])
    counts = Counter() if table is None else _counts(table.append_column("_dropped", pa.repeat(False, table.num_rows)))
    policies = [epoch.spec.release.on_late, *(w.on_late for w in epoch.spec.windows.values())]
    if LatePolicy.DROP in policies:
        counts += _counts(fetch(rows.where("_dropped").groupBy(*_COUNTED).count()).drop_columns(["count"]))
    return LateRows(written, counts)


def _time(epoch: Epoch) -> str:
    return next(iter(epoch.spec.sources.values())).event_time
