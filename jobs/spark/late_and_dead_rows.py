"""The late table, and the dead-letter table.

Rows late for the events output and for each window, each with the frontier it missed, and rows that
the survey set aside.

Late rows have an event time below F whatever the rules, so with no row below F there is nothing
else to look for. No condition names F in the code that Spark generates (see `opaque_literal`).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from tidegate.checkpoints.row_counts import LATE_ROWS
from tidegate.jobs.rows.dead_rows import (
    CONDITION_GROUP,
    IS_COUNTED,
    count_conditions,
    count_dead_letters,
    show_dead_letters,
)
from tidegate.jobs.rows.late_rows import (
    COUNTED_COLUMNS,
    ROW_IDENTITY,
    LateCounts,
    SourceCounts,
    count_expired_pairs,
    count_late_rows,
    find_late_rows,
    find_refused_late_row,
    find_violations,
    has_late_rows,
    show_late_rows,
    show_set_aside,
    sum_late_groups,
)
from tidegate.jobs.rows.slice_reading import select_provenance
from tidegate.jobs.rules.duck_frame import DuckFrame, Frame, combine_frames, group_rows
from tidegate.jobs.spec.event_time_options import LatePolicy
from tidegate.jobs.spec.pipeline import DEAD_LETTERS, EVENTS, LATE
from tidegate.jobs.spec.window_specs import WindowKind

from .cut_survey import MemberScans
from .epoch_context import FETCH_ROWS, EpochContext, WrittenFiles, collect_to_driver
from .session_windows import select_late_for_sessions


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

    written: WrittenFiles = field(default_factory=WrittenFiles)
    late: LateCounts = field(default_factory=Counter)
    counts: SourceCounts = field(default_factory=Counter)


def write_late_rows(epoch: EpochContext, context_for: Callable[[str], EpochContext]) -> CountedRows:
    """Write the late table of an epoch: late rows, and those of ``max_jump`` and ``cti_violation``.

    `context_for` gives the context in which an output's rows are judged.

    Raises:
        PoisonError: a late row under ``on_late: error``, named; for events also a row before its
            member's punctuation.
    """
    frames = [
        _show_set_aside(epoch),
        _show_late_rows(epoch, EVENTS),
        *(_show_late_rows(context_for(name), name) for name in epoch.spec.windows),
    ]
    here = combine_frames(*(frame for frame in frames if isinstance(frame, DuckFrame)))
    there = combine_frames(*(frame for frame in frames if not isinstance(frame, DuckFrame)))
    if here is None and there is None:
        return CountedRows()
    if here is not None or there is None or epoch.staged.rows <= FETCH_ROWS:
        tables = [collect_to_driver(frame) for frame in (here, there) if frame is not None]
        late = _write_late_in_driver(epoch, pa.concat_tables(tables, promote_options="permissive"))
    else:
        late = _write_late_in_tasks(epoch, there)
    return replace(late, counts=late.counts + count_expired_pairs(epoch.judged, late.late))


def _show_set_aside(epoch: EpochContext) -> Frame | None:
    _refuse_late_rows(epoch, find_violations(epoch.judged), EVENTS)
    return show_set_aside(epoch.judged)


def _show_late_rows(epoch: EpochContext, output: str) -> Frame | None:
    """Rows that are late for an output, events or a window, with the columns of the late table."""
    judged, window = epoch.judged, epoch.spec.windows.get(output)
    if window is None or window.kind is not WindowKind.SESSION:
        rows = find_late_rows(judged, output)
    elif epoch.data is None or not has_late_rows(judged, output):
        rows = None
    else:
        rows = select_late_for_sessions(epoch, output)
    _refuse_late_rows(epoch, rows, output)
    return None if rows is None else show_late_rows(judged, output, rows)


def _refuse_late_rows(epoch: EpochContext, rows: Frame | None, output: str) -> None:
    refused = find_refused_late_row(epoch.judged, rows, output)
    if refused is not None:
        raise refused


def _write_late_in_driver(epoch: EpochContext, table: pa.Table) -> CountedRows:
    kept = table.filter(pc.invert(table["_dropped"])).drop_columns(["_dropped"])
    written = epoch.writer.write_table(LATE, kept, epoch.spec.event_time_column)
    return CountedRows(written, *count_late_rows(table))


def _write_late_in_tasks(epoch: EpochContext, rows: DataFrame) -> CountedRows:
    kept = rows.where("NOT _dropped").drop("_dropped")
    written = epoch.writer.write_table(LATE, kept, epoch.spec.event_time_column)
    late, table = CountedRows(written), written.read_columns(["output", "reason", *ROW_IDENTITY])
    if table is not None:
        is_dropped = pa.repeat(False, table.num_rows)
        late = CountedRows(written, *count_late_rows(table.append_column("_dropped", is_dropped)))
    policies = {epoch.spec.release.on_late, *(w.on_late for w in epoch.spec.windows.values())}
    if LatePolicy.DROP not in policies:
        return late
    # Dropped rows are in no file, and may be more than the driver holds. The same row may be in the
    # late table for another output, so Spark looks at both.
    dropped = group_rows(rows.where("_dropped"), COUNTED_COLUMNS, {"count_all": "count(*)"})
    distinct = collect_to_driver(rows.select(*ROW_IDENTITY).distinct().groupBy("_source").count())
    return CountedRows(
        written,
        late.late + sum_late_groups(collect_to_driver(dropped).to_pylist()),
        Counter({(r["_source"], LATE_ROWS): r["count"] for r in distinct.to_pylist()}),
    )


# Dead letters: rows that cannot be taken as the schema declares them, kept as JSON text with their
# origin.


def write_dead_letters(epoch: EpochContext, scans: MemberScans) -> CountedRows:
    """Write the dead rows of an epoch to their table, and count what conditions say of its rows.

    Rows that are filtered, or that a rule drops, are counted only.
    """
    has_conditions = any(source.has_conditions for source in epoch.spec.sources.values())
    if not has_conditions and not any(member.dead for member in scans.survey.members):
        return CountedRows()
    frame: Frame | None
    if epoch.native and scans.judged is not None:
        provenance = select_provenance(epoch.spec, epoch.staged.cut)[len(epoch.spec.columns) :]
        frame = DuckFrame.from_table(scans.judged).selectExpr("*", *provenance)
    else:  # only Spark knows them
        frame = epoch.staged.frame
    if frame is None:
        return CountedRows()
    rows = show_dead_letters(frame, epoch.staged.parts, epoch.provenance_columns())
    written = epoch.writer.write_table(
        DEAD_LETTERS, epoch.collect_if_small(rows, epoch.staged.rows), None
    )
    letters, dead = written.read_columns(["_source", "reason"]), CountedRows(written)
    if letters is not None:
        dead.counts.update(count_dead_letters(letters))
    if has_conditions:
        grouped = group_rows(
            frame.where(IS_COUNTED), list(CONDITION_GROUP), {"count_all": "count(*)"}
        )
        groups = collect_to_driver(grouped).to_pylist()
        dropped, counts = count_conditions(epoch.spec, epoch.staged.cut, groups)
        dead.late.update(dropped)
        dead.counts.update(counts)
    return dead
