"""Rows that are late for an output, and rows that the survey set aside, as the late table has them.

Late rows have an event time below F whatever the rules, so with no row below F there is nothing
else to look for.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import pyarrow as pa

from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.row_counts import LATE_ROWS
from tidegate.errors import PoisonError
from tidegate.jobs.rules.duck_frame import Frame, group_rows
from tidegate.jobs.rules.row_conditions import (
    expired_pairs_sql,
    late_for_window_sql,
    time_below_sql,
    write_ticks,
)
from tidegate.jobs.spec.event_time_options import LatePolicy
from tidegate.jobs.spec.pipeline import EVENTS
from tidegate.jobs.spec.table_layout import LateReason
from tidegate.jobs.spec.window_specs import WindowKind
from tidegate.time_units import TICK_MAX, TICK_MIN

from .errors import LATE_ROW
from .judged_rows import JudgedRows

SourceCounts = Counter[tuple[str, str]]
"""(source, name of a count) -> rows."""
LateCounts = Counter[tuple[str, str, str, bool]]
"""Rows by source, output, reason and whether they were dropped."""

COUNTED_COLUMNS: Final = ["_source", "output", "reason", "_dropped"]
ROW_IDENTITY: Final = ["_source", "_partition", "_seq"]


@dataclass(frozen=True)
class CountedRows:
    """Rows that were late; or that the schema, their time or a rule stops, or rules warn about.

    Attributes:
        written: files of the late or the dead-letter table; dropped rows are in none.
        late: what was late, or what rules dropped.
        counts: rows of each source. Late ones: (source, `late_rows`) -> rows that are late for at
            least one output or set aside; each counts once, dropped ones too. (source, `expired:`
            and a window) -> pairs of a row and a window that was purged before the row came;
            sessions are not counted. Others: what became of them, in the files, left out by
            `where`, or by the rules that they break.
    """

    written: tuple[FileRef, ...] = ()
    late: LateCounts = field(default_factory=Counter)
    counts: SourceCounts = field(default_factory=Counter)

    def __add__(self, other: Self) -> Self:
        """Return both."""
        return replace(
            self,
            written=self.written + other.written,
            late=self.late + other.late,
            counts=self.counts + other.counts,
        )


def get_late_policy(judged: JudgedRows, output: str) -> LatePolicy:
    """What becomes of rows that are late for events or a window."""
    window = judged.spec.windows.get(output)
    return judged.spec.release.on_late if window is None else window.on_late


def find_late_rows(judged: JudgedRows, output: str) -> Frame | None:
    """The data rows that are late for events, or for a tumbling or sliding window.

    None if there can be none.
    """
    window = judged.spec.windows.get(output)
    bound = judged.late_bound if window is None else judged.frontier
    if judged.data is None or not judged.has_rows_below(bound):
        return None
    late = time_below_sql(bound) if window is None else late_for_window_sql(window, bound)
    if get_late_policy(judged, output) is LatePolicy.ADJUST:
        late = f"{late} AND _end <= {max(judged.frontier, bound)}L"
    return judged.data.where(late)


def find_violations(judged: JudgedRows) -> Frame | None:
    """The rows before their own member's punctuation; None if there can be none."""
    return None if judged.aside is None else judged.aside.where("_verdict = 'cti_violation'")


def show_set_aside(judged: JudgedRows) -> Frame | None:
    """Rows that the survey set aside, quarantined or before their member's punctuation, as shown.

    None if there can be none.
    """
    if judged.aside is None:
        return None
    frontier = judged.frontier
    missed = "_mark" if frontier == TICK_MIN else f"coalesce(_mark, {frontier}L)"
    return judged.aside.where("_verdict IN ('cti_violation', 'max_jump')").selectExpr(
        *judged.row_columns,
        "'events' AS output",
        "_verdict AS reason",
        f"{missed} - _et AS lateness_us",
        f"timestamp_micros({missed}) AS frontier",
        *judged.provenance_columns(),
        "false AS _dropped",
    )


def show_late_rows(judged: JudgedRows, output: str, rows: Frame) -> Frame:
    """Late rows of an output with the columns of the late table, and `_dropped`."""
    policy = get_late_policy(judged, output)
    reason: LateReason = "late_order" if output == EVENTS else "late_window"
    if policy is LatePolicy.REJECT_TO_ORIGIN:
        reason = "rejected"
    elif output == EVENTS and policy is LatePolicy.EMIT_FLAGGED:
        reason = "flagged"
    return rows.selectExpr(
        *judged.row_columns,
        f"'{output}' AS output",
        f"'{reason}' AS reason",
        *_missed_frontier_sql(_get_missed_frontier(judged, output)),
        *judged.provenance_columns(),
        f"{str(policy is LatePolicy.DROP).lower()} AS _dropped",
    )


def find_refused_late_row(
    judged: JudgedRows, rows: Frame | None, output: str
) -> PoisonError | None:
    """The error for the first of some rows under ``on_late: error``; None if none is refused."""
    if rows is None or get_late_policy(judged, output) is not LatePolicy.ERROR:
        return None
    first = rows.selectExpr("_source", "_partition", "_seq", "_et").limit(1)
    found = first.toArrow().to_pylist()
    if not found:
        return None
    row = found[0]
    return LATE_ROW(
        pipeline=judged.spec.name,
        source=row["_source"],
        partition=row["_partition"],
        seq=row["_seq"],
        time=row["_et"],
        output=output,
        frontier=_get_missed_frontier(judged, output),
    )


def _get_missed_frontier(judged: JudgedRows, output: str) -> int:
    """What a late row of an output missed."""
    return judged.events_frontier if output == EVENTS else judged.frontier


def _missed_frontier_sql(frontier: int) -> list[str]:
    if frontier == TICK_MIN:
        return ["CAST(NULL AS bigint) AS lateness_us", "CAST(NULL AS timestamp) AS frontier"]
    mark = write_ticks(frontier)
    lateness = f"least(CAST({mark} AS decimal(20,0)) - _et, {TICK_MAX})"
    return [f"CAST({lateness} AS bigint) AS lateness_us", f"timestamp_micros({mark}) AS frontier"]


def count_groups(table: pa.Table, columns: list[str]) -> list[dict[str, Any]]:
    """Each group of a table, with the number of its rows as `count_all`."""
    grouped = table.select(columns).group_by(columns).aggregate([([], "count_all")])
    return list(grouped.to_pylist())


def count_late_rows(table: pa.Table) -> tuple[LateCounts, SourceCounts]:
    """What was late, and (source, `late_rows`) -> rows late for at least one output."""
    # A row that misses several outputs counts once.
    rows = table.select(ROW_IDENTITY).group_by(ROW_IDENTITY).aggregate([])
    distinct = Counter((source, LATE_ROWS) for source in rows["_source"].to_pylist())
    late = {
        tuple(group[column] for column in COUNTED_COLUMNS): group["count_all"]
        for group in count_groups(table, COUNTED_COLUMNS)
    }
    return Counter(late), distinct


def count_expired_pairs(judged: JudgedRows) -> SourceCounts:
    """Count (source, `expired:` and a window) -> pairs of a row and a window purged before it came.

    Pairs with sessions are not counted.
    """
    before = judged.frontier
    found = SourceCounts()
    if judged.data is None or not judged.has_rows_below(before):
        return found
    pairs = {
        f"expired:{name}": expired_pairs_sql(window, before)
        for name, window in judged.spec.windows.items()
        if window.kind is not WindowKind.SESSION
    }
    sums = {f"_p{place}": f"CAST(sum({sql}) AS bigint)" for place, sql in enumerate(pairs.values())}
    if all(sql == "0L" for sql in pairs.values()):
        return found
    # A window that a later row is in is not purged.
    early = judged.data.where(time_below_sql(before))
    for row in group_rows(early, ["_source"], sums).toArrow().to_pylist():
        for name, column in zip(pairs, sums, strict=True):
            found[row["_source"], name] += row[column]
    return found
