"""Small pandas frames for the suites, computed from the tables and manifests without I/O.

Rows are counted by the manifests alone (`checkpoints/row_counts.py`). Columns named `recent_*` are
about the epochs after `Evidence.recent_since`; other columns are about the whole lineage, unless
the frame as a whole is about recent rows. Every frame has all its columns, even without rows. A
null means *does not apply* and passes value checks. Quantiles are computed here because GX 1.24's
own quantile expectation cannot store its result.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.freshness import Wait, find_outages, select_since_outage
from tidegate.checkpoints.row_counts import (
    COLUMNS_LEFT_OUT,
    FLAGGED,
    NULLS_FILLED,
    ROW_NOTES,
    RowCounts,
)
from tidegate.jobs.rules.duck_frame import open_database
from tidegate.jobs.spec.event_time_options import ReleaseMode
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.pipeline import (
    BARRIERS,
    CHECKPOINTS,
    DEAD_LETTERS,
    EVENTS,
    LATE,
    PipelineSpec,
)
from tidegate.jobs.spec.row_rules import RULE_QUARANTINED

from .evidence import ORIGIN, Evidence
from .job_batches import JOB_SUMMARIES, JobEvidence

_TICKS_PER_SECOND = 1_000_000
# A row that no tardy member wrote is a close of its own, also if it repeats another one.
_CLOSES = """
    with numbered as (
        select *, row_number() over (partition by barrier_id, section order by _epoch) as nth
        from barriers
    ), closes as (
        select * replace (
                coalesce(types, []) as types, coalesce(missing, []) as missing,
                coalesce(tardy, []) as tardy
            ), first_epoch as epoch, first_epoch > $since as recent,
            coalesce(waited_us, 0) / 1e6 as waited_s,
            count(*) over (partition by barrier_id) as closings,
            (barrier_id, section, opened) as close
        from (
            select *, min(_epoch) over same as first_epoch,
                min(coalesce(len(tardy), 0)) over same as fewest_tardy
            from (select *, if(nth = 1 or len(tardy) > 0, 1, nth) as opened from numbered)
            window same as (partition by barrier_id, section, opened)
            qualify row_number() over (
                partition by barrier_id, section, opened order by nth desc
            ) = 1
        )
        -- A close has no tardy member yet: without such a row it lies before what was read.
        where not ($view > 0 and fewest_tardy > 0)
    )
"""


def summarize_late_by_source(evidence: Evidence) -> pd.DataFrame:
    """Return one row per source: its late rows, in all and recently, and how late the recent were.

    A row counts if it was late for at least one output. Sources that the spec no longer has are
    there as well if the late table has recent rows of them. `source_in_spec` says whether any spec
    of the lineage has had the source. Lateness and lag are in seconds.
    """
    late = evidence.select_recent(evidence.late).to_pandas()
    every, recent = evidence.count_rows()
    # Sources that were taken out of the spec still have rows in the tables. The manifests count on
    # for every source that a spec of this lineage has had, so those that it does not know are odd.
    strangers = sorted(set(late["_source"]) - set(evidence.spec.sources))
    known = {*evidence.spec.sources, *every}
    rows = []
    for source in [*evidence.spec.sources, *strangers]:
        own = late.loc[late["_source"] == source, "lateness_us"] / _TICKS_PER_SECOND
        p50, p99, largest = (_compute_quantile(own, q) for q in (0.50, 0.99, 1.0))
        now, newest = every[source], recent[source]
        ratio = _use_nan_for_none(newest.late_ratio)
        # All epochs but the recent ones, so that a rise is not compared with itself.
        rise = ratio - _use_nan_for_none(now.since(newest).late_ratio)
        spec = evidence.spec.sources.get(source)
        lag = spec.lag / _TICKS_PER_SECOND if spec and spec.lag else np.nan
        missing = float(_count_in_late_table(newest) - len(own))
        counts = (now["read"], now.late_rows, _use_nan_for_none(now.late_ratio))
        recently = (newest["read"], newest.late_rows, ratio, rise)
        names = (source, "yes" if source in known else "no")
        rows.append((*names, *counts, *recently, p50, p99, largest, lag, largest / lag, missing))
    return _make_frame(
        "source source_in_spec rows_read rows_late late_ratio recent_read recent_late"
        " recent_late_ratio late_ratio_rise lateness_p50_s lateness_p99_s lateness_max_s lag_s"
        " lateness_lags late_rows_missing",
        rows,
    )


def summarize_late_by_output(evidence: Evidence) -> pd.DataFrame:
    """One row per output: rows offered to it and late for it, in all and recently."""

    def count(rows: RowCounts, output: str) -> tuple[float, ...]:
        late = rows.late_by_output.get(output, 0)
        return rows.count_offered(output), late, _use_nan_for_none(rows.late_share(output))

    both = evidence.count_all_sources()
    return _make_frame(
        "output rows_offered rows_late late_share recent_offered recent_late recent_late_share",
        [
            (output, *(figure for rows in both for figure in count(rows, output)))
            for output in (EVENTS, *evidence.spec.windows)
        ],
    )


def summarize_late_by_reason(evidence: Evidence) -> pd.DataFrame:
    """One row per output and reason of the recent late table: rows and lateness in seconds.

    The lateness is null for reasons other than the frontier.
    """
    query = """
        select reason, output, count(*) as rows, min(seconds) as lateness_min_s,
            median(seconds) as lateness_median_s, max(seconds) as lateness_max_s
        from (
            select *, if(
                reason in ('late_order', 'late_window', 'flagged'), lateness_us / 1e6, null
            ) as seconds from late
        ) group by all order by output, reason
    """
    return _run_query(query, late=evidence.select_recent(evidence.late))


def summarize_dropped(evidence: Evidence) -> pd.DataFrame:
    """One row per source and output that dropped rows (counted, kept in no table).

    In all and recently, with the share of the source's recent rows.
    """
    every, recent = evidence.count_rows()
    rows = []
    for source, now in every.items():
        for output in (EVENTS, *evidence.spec.windows):
            name = "dropped" if output == EVENTS else f"dropped:{output}"
            total, newest = now[name], recent[source][name]
            if total:
                ratio = _compute_ratio(newest, recent[source]["read"])
                rows.append((source, output, total, newest, ratio))
    columns = "source output rows_dropped recent_dropped recent_dropped_ratio"
    return _make_frame(columns, rows)


def summarize_stream_rejections(evidence: Evidence) -> pd.DataFrame:
    """One row per stream: rows that it rejected, in all and recently.

    The share is that of the rows that the pipeline read recently.
    """
    now, newest = evidence.count_all_sources()
    rejected, recent = now.count_stream_rejections(), newest.count_stream_rejections()
    rows = []
    for name in evidence.spec.streams:
        some = recent.get(name, 0)
        rows.append((name, rejected.get(name, 0), some, _compute_ratio(some, newest["read"])))
    return _make_frame("stream rows_rejected recent_rejected recent_rejected_ratio", rows)


def summarize_rules(evidence: Evidence) -> pd.DataFrame:
    """One row per row rule: rows that broke it, whatever became of them, in all and recently.

    The share is that of the rows read recently from its source.
    """
    every, recent = evidence.count_rows()
    rows = []
    for source, spec in evidence.spec.sources.items():
        broken, newest = every[source].count_broken_rules(), recent[source].count_broken_rules()
        for rule, own in spec.rules.items():
            some = newest.get(rule, 0)
            ratio = _compute_ratio(some, recent[source]["read"])
            rows.append((f"{source}.{rule}", own.severity, broken.get(rule, 0), some, ratio))
    columns = "rule severity rows_broken recent_broken recent_broken_ratio"
    return _make_frame(columns, rows)


def summarize_barriers(evidence: Evidence) -> pd.DataFrame:
    """One row per barrier that closed recently.

    `closings` counts the closes of an id; more than one is a defect.
    """
    query = """
        select barrier_id, epoch, outcome, if(homogeneous, 'yes', 'no') as homogeneous,
            array_to_string([
                if(contains(kind, ',') or contains(kind, '"'),
                    '"' || replace(kind, '"', '""') || '"', kind)
                for kind in list_sort(list_distinct(types))
            ], ',') as types,
            array_to_string(missing, ', ') as missing, len(missing) as missing_members,
            array_to_string(tardy, ', ') as tardy, len(tardy) as tardy_members,
            waited_s, closings, participants
        from closes where recent order by epoch, barrier_id
    """
    return _query_closes(evidence, query)


def summarize_barrier_health(evidence: Evidence) -> pd.DataFrame:
    """One row over all barriers; waits, in seconds, and missing ids are of the recent ones."""
    query = """
        select $barriers + count(*) filter (epoch > $counted) as barriers,
            $complete + count(*) filter (whole and epoch > $counted) as complete,
            complete / barriers as complete_ratio,
            count(*) filter (recent) as recent_barriers,
            count(*) filter (recent and whole) as recent_complete,
            count(*) filter (recent and outcome = 'incomplete') as recent_incomplete,
            count(*) filter (recent and outcome = 'aborted') as recent_aborted,
            recent_complete / recent_barriers as recent_complete_ratio,
            quantile_cont(waited_s, 0.5) filter (recent) as waited_p50_s,
            quantile_cont(waited_s, 0.99) filter (recent) as waited_p99_s,
            quantile_cont(waited_s, 0.99) filter (recent and whole) as complete_p99_s,
            least(  -- ids may be hashes
                coalesce(
                    max(barrier_id::hugeint) filter (recent) - min(barrier_id) filter (recent) + 1
                    - count(distinct barrier_id) filter (recent), 0
                ), 9223372036854775807
            )::bigint as ids_missing
        from (select *, outcome = 'complete' as whole from closes)
    """
    totals = {name: evidence.totals.get(name, 0) for name in ("barriers", "complete")}
    frame = _query_closes(evidence, query, counted=evidence.totals_upto, **totals)
    frame.insert(0, "pipeline", evidence.spec.name)
    return frame


def summarize_barrier_types(evidence: Evidence) -> pd.DataFrame:
    """One row per type of barrier: how the recent barriers of that type closed.

    A barrier to which the members brought several types counts for each of them.
    """
    query = """
        select type, count(*) as barriers, count(*) filter (outcome = 'complete') as complete,
            count(*) filter (outcome = 'incomplete') as incomplete,
            count(*) filter (outcome = 'aborted') as aborted, complete / barriers as complete_ratio
        from (select outcome, unnest(list_distinct(types)) as type from closes where recent)
        group by type order by type
    """
    return _query_closes(evidence, query)


def summarize_barrier_members(evidence: Evidence) -> pd.DataFrame:
    """One row per member: how it took part in the barriers that closed recently.

    `held_p99_s` is the time, in seconds, for which the member was the only one that the others
    waited for; null if it was never the last of several.
    """
    query = """
        select member, count(*) filter (part = 'arrived') as arrived, count(held) as last,
            count(*) filter (part = 'missing') as missing,
            count(*) filter (part = 'tardy') as tardy,
            missing / any_value(number) as missing_ratio, tardy / any_value(number) as tardy_ratio,
            quantile_cont(held, 0.99) as held_p99_s
        from (
            select member, 'arrived' as part, if(
                lead(member) over in_order is null,
                (arrival - lag(arrival) over in_order) / 1e6,
                null
            ) as held
            from (
                select close, key as member, (value ->> 'arrived')::bigint as arrival
                from closes, json_each(participants) where recent
            ) window in_order as (partition by close order by arrival, member)
            union all select unnest(missing), 'missing', null from closes where recent
            union all select unnest(tardy), 'tardy', null from closes where recent
        ), (select count(*) as number from closes where recent)
        group by member order by member
    """
    return _query_closes(evidence, query)


def summarize_freshness(evidence: Evidence) -> pd.DataFrame:
    """One row per source: time from the arrival of objects until recent epochs sealed them.

    In seconds. An epoch counts with the oldest object that it read of the source. Rows that waited
    for an outage, or for the start of a driver, count only until the driver has caught up.
    """
    goal = evidence.spec.quality.limits.freshness or evidence.spec.supervision.freshness or 0
    waits: dict[str, list[Wait]] = {source: [] for source in evidence.spec.sources}
    sealed = [manifest.created_at for manifest in evidence.manifests]
    for manifest, paused in zip(evidence.manifests, find_outages(sealed, goal), strict=True):
        for source, arrived in manifest.find_oldest_arrivals().items():
            wait = Wait(arrived, manifest.created_at, paused)
            waits.setdefault(source, []).append(wait)
    rows = []
    for source, found in waits.items():
        judged = select_since_outage(found, goal)
        seconds = [max(0, wait.done - wait.arrived) / _TICKS_PER_SECOND for wait in judged]
        quantiles = (_compute_quantile(seconds, q) for q in (0.50, 0.95))
        rows.append((source, len(seconds), *quantiles))
    return _make_frame("source epochs sealed_p50_s sealed_p95_s", rows)


def summarize_checkpoints(evidence: Evidence) -> pd.DataFrame:
    """One row per recent published checkpoint, oldest first.

    With the attempts that failed before it, and the bytes of the state that a restore reads.
    """
    # Rows in the order buffer were read earlier and leave later: both ends belong to the balance.
    query = """
        select checkpoint_id, _epoch as epoch, rows_read, rows_late,
            rows_read + lag(rows_retained, 1, 0) over by_epoch - rows_released - rows_late
                - rows_dropped - rows_rejected - rows_dead - rows_retained as rows_unaccounted,
            _epoch - lag(_epoch, 1, 0) over by_epoch - 1 as epochs_skipped,
            epoch_ms / 1e3 as epoch_s, seal_ms / 1e3 as seal_s
        from checkpoints window by_epoch as (order by _epoch) order by _epoch
    """
    frame = _run_query(query, checkpoints=evidence.checkpoints)
    frame = frame[frame["epoch"] > evidence.recent_since].reset_index(drop=True)
    aborted = {m.slot: len(m.epoch_notes.aborted) for m in evidence.manifests}
    state = {m.slot: sum(file.bytes for file in m.segments) for m in evidence.manifests}
    return frame.assign(
        aborted_attempts=frame["epoch"].map(aborted).astype("float64"),
        state_bytes=frame["epoch"].map(state).astype("float64"),
    )


def summarize_checkpoint_health(evidence: Evidence) -> pd.DataFrame:
    """Return one row for the pipeline: number, age and state of its published checkpoints.

    It has the age of the newest (null unless `Evidence.wanted`) and whether its objects exist,
    quantiles of the durations of recent epochs and seals, how many sealed slots are not published,
    and whether the tables show the current timeline. Gaps and the row equation are in
    `summarize_checkpoints`.
    """
    recent = summarize_checkpoints(evidence)
    counted = pc.sum(pc.greater(evidence.checkpoints["_epoch"], evidence.totals_upto)).as_py() or 0
    head = evidence.head
    # A stopped pipeline grows older without being ill.
    sealed_at = head.created_at if head and evidence.wanted else np.nan
    return pd.DataFrame(
        [
            {
                "pipeline": evidence.spec.name,
                "checkpoints": evidence.totals.get("checkpoints", 0) + counted,
                "newest": str(head.id) if head else "none",
                "verified": evidence.verified,
                "age_s": (evidence.now - sealed_at) / _TICKS_PER_SECOND,
                "epoch_p95_s": _compute_quantile(recent["epoch_s"], 0.95),
                "seal_p95_s": _compute_quantile(recent["seal_s"], 0.95),
                "unpublished": evidence.sealed - (head.slot if head else 0),
                "tables_behind": "yes" if evidence.tables_behind else "no",
            }
        ]
    )


def summarize_dead_letters(evidence: Evidence) -> pd.DataFrame:
    """One row per reason and source of recent dead letters: `rows`, and whole `objects`."""
    # A dead letter without a row is a whole object that could not be read.
    query = """
        select reason, _source as source, count("row") as rows, count(*) - rows as objects
        from dead_letters group by all order by all
    """
    return _run_query(query, dead_letters=evidence.select_recent(evidence.dead_letters))


def summarize_dead_letter_health(evidence: Evidence) -> pd.DataFrame:
    """One row over all dead letters, and rows whose objects have other columns than declared."""
    now, newest = evidence.count_all_sources()
    return pd.DataFrame(
        [
            {
                "pipeline": evidence.spec.name,
                "rows_read": now["read"],
                "dead_rows": now["dead_lettered"],
                "dead_ratio": _compute_ratio(now["dead_lettered"], now["read"]),
                "recent_read": newest["read"],
                "recent_dead_rows": newest["dead_lettered"],
                "recent_dead_ratio": _compute_ratio(newest["dead_lettered"], newest["read"]),
                "recent_lost_ratio": _compute_ratio(
                    newest["dead_lettered"] + newest[RULE_QUARANTINED], newest["read"]
                ),
                "recent_changed_columns": newest[NULLS_FILLED] + newest[COLUMNS_LEFT_OUT],
                **{
                    f"{prefix}{name}": counts[name]
                    for prefix, counts in (("", now), ("recent_", newest))
                    for name in ROW_NOTES
                    if name.startswith(("dead", "nulls", "columns"))
                },
            }
        ]
    )


def summarize_release(evidence: Evidence) -> pd.DataFrame:
    """One row over the events table after `Evidence.events_since`: what is missing or doubled."""
    # Rows flagged late left out of turn by design.
    query = """
        select count(*) as events,
            coalesce(greatest(max(position) + 1, $noted) - coalesce(
                $begin, if($since > 0, min(position), 0)
            ), 0) - count(distinct position) as positions_missing,
            events - count(distinct position) as positions_doubled,
            events - (
                select count(*) from (select distinct _source, _partition, _seq from released)
            ) as rows_doubled,
            (
                select count(*) filter (section < earlier.section or (
                    section = earlier.section and _time < earlier.time
                )) from (
                    select section, _time, lag({section: section, time: _time})
                        over (order by position) as earlier
                    from released where _late is not true
                )
            ) as rows_out_of_order
        from released
    """
    head = evidence.head
    # An older slice begins where the one before it has ended.
    begin = evidence.past.next_position if evidence.is_older and evidence.past else None
    given = {
        "noted": head.next_position if head else 0,
        "since": evidence.events_since,
        "begin": begin,
    }
    times = evidence.events[evidence.spec.event_time_column]
    frame = _run_query(query, given, released=evidence.events.append_column("_time", times))
    frame.insert(0, "pipeline", evidence.spec.name)
    if evidence.spec.release.mode is ReleaseMode.PASS_THROUGH:
        frame["rows_out_of_order"] = np.nan
    return frame


SUMMARIES: Mapping[str, Callable[[Evidence], pd.DataFrame]] = {
    build.__name__.removeprefix("summarize_"): build
    for build in (
        summarize_late_by_source,
        summarize_late_by_output,
        summarize_late_by_reason,
        summarize_dropped,
        summarize_stream_rejections,
        summarize_barriers,
        summarize_barrier_health,
        summarize_barrier_types,
        summarize_barrier_members,
        summarize_checkpoints,
        summarize_checkpoint_health,
        summarize_freshness,
        summarize_dead_letters,
        summarize_dead_letter_health,
        summarize_release,
        summarize_rules,
    )
}
"""Name of a summary in a suite file -> how it is built. The first column names the row."""


TABLE_PREFIX = "table."
"""Before the name of a table, as the summary of a check that looks at the table itself."""


def build_frame(evidence: Evidence | JobEvidence, summary: str) -> pd.DataFrame:
    """Build a summary, or the frame of the recent rows of a table (``table.NAME``).

    The frame of a table has the column `_row` in front, which names each row by its origin.
    """
    if isinstance(evidence, JobEvidence):
        return JOB_SUMMARIES[summary](evidence.manifests)
    if not summary.startswith(TABLE_PREFIX):
        return SUMMARIES[summary](evidence)
    table = evidence.tables[summary.removeprefix(TABLE_PREFIX)]
    frame: pd.DataFrame = table.to_pandas()
    frame.insert(0, "_row", name_rows(table))
    return frame


def list_frame_columns(spec: PipelineSpec | JobSpec, summary: str) -> list[str]:
    """List the columns of a summary or of a table's frame, from tables without rows."""
    if isinstance(spec, JobSpec):
        return list(JOB_SUMMARIES[summary](()).columns)
    from tidegate.jobs.sinks.output_tables import build_table_schema

    names = (LATE, BARRIERS, CHECKPOINTS, DEAD_LETTERS, EVENTS)
    empty = {name: build_table_schema(spec, name).empty_table() for name in names}
    if summary.startswith(TABLE_PREFIX):
        return ["_row", *build_table_schema(spec, summary.removeprefix(TABLE_PREFIX)).names]
    nothing: Any = {"events_since": 0, "head": None, "past": None, "sealed": 0, "now": 0}
    evidence = Evidence(spec, **empty, **nothing, wanted=False, verified="none")
    return list(SUMMARIES[summary](evidence).columns)


def find_column_kind(spec: PipelineSpec, table: str, column: str) -> str | None:
    """Return whether a table's column holds a number, a text or a time; None: another type."""
    from tidegate.jobs.sinks.output_tables import build_table_schema

    kind = build_table_schema(spec, table).field(column).type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if pa.types.is_timestamp(kind):
        return "time"
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else None


def name_rows(table: pa.Table) -> list[str]:
    """Return the origin of each row; its epoch and its number where it has none."""
    if {*ORIGIN} <= {*table.column_names}:
        return ["/".join(map(str, row.values())) for row in table.select(ORIGIN).to_pylist()]
    return [f"{epoch}:{n}" for n, epoch in enumerate(table["_epoch"].to_pylist())]


def _run_query(
    query: str, parameters: Mapping[str, Any] | None = None, **tables: pa.Table
) -> pd.DataFrame:
    """Run a query of DuckDB over some tables."""
    with open_database() as session:
        for name, table in tables.items():
            session.register(name, table)
        return session.execute(query, parameters).df()


def _query_closes(evidence: Evidence, query: str, **parameters: int) -> pd.DataFrame:
    """Run a query over the closes of the barriers that were read.

    A tardy member writes the row of its barrier again, with the same section (docs/semantics.md,
    section 3.7): that is the same close, in the epoch of its first row.
    """
    given = {"since": evidence.recent_since, "view": evidence.view_since, **parameters}
    return _run_query(_CLOSES + query, given, barriers=evidence.barriers)


def count_closes(barriers: pa.Table, view_since: int, epochs: tuple[int, int]) -> dict[str, int]:
    """Count the barriers that closed after an epoch up to another one, and the complete ones.

    Args:
        barriers: rows of the barriers table after epoch `view_since`.
        view_since: 0 if it is the whole table.
        epochs: the two epochs.
    """
    query = """
        select count(*) as barriers, count(*) filter (outcome = 'complete') as complete
        from closes where recent and epoch <= $last
    """
    given = {"since": epochs[0], "last": epochs[1], "view": view_since}
    row = _run_query(_CLOSES + query, given, barriers=barriers).iloc[0]
    return {name: int(row[name]) for name in ("barriers", "complete")}


def _make_frame(columns: str, rows: Sequence[tuple[Any, ...]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=columns.split())


def _count_in_late_table(counts: RowCounts) -> int:
    """Rows that the late table has: one for each output that a row missed and was not dropped."""
    kept = counts["late"] + counts["rejected"] + counts[FLAGGED]
    return kept + sum(
        rows
        for (output, disposition, _), rows in counts.late_by_reason.items()
        if output != EVENTS and disposition == "late"
    )


def _use_nan_for_none(ratio: float | None) -> float:
    return np.nan if ratio is None else ratio


def _compute_ratio(part: int, whole: int) -> float:
    return part / whole if whole else np.nan


def _compute_quantile(values: Any, q: float) -> float:
    """Of the values that are known; NaN if none is."""
    return float(pd.Series(values, dtype="float64").quantile(q))
