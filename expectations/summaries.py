"""Small pandas frames for the suites, computed from the tables and manifests without I/O.

Rows are counted by the manifests alone (`checkpoints/row_counts.py`). Columns named `recent_*` are
about the epochs after `Evidence.recent_since`; other columns are about the whole lineage, unless
the frame as a whole is about recent rows. Every frame has all its columns, even without rows. A
null means *does not apply* and passes value checks. Quantiles are computed here because GX 1.24's
own quantile expectation cannot store its result.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from tidegate.checkpoints.row_counts import (
    COLUMNS_LEFT_OUT,
    FLAGGED,
    NULLS_FILLED,
    ROW_NOTES,
    RowCounts,
)
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

from .evidence import ORIGIN, Evidence, event_columns
from .job_batches import JOB_SUMMARIES, JobEvidence

_TICKS_PER_SECOND = 1_000_000
_DISPOSITIONS = [
    *("rows_released", "rows_late", "rows_dropped", "rows_rejected", "rows_dead", "rows_retained"),
]


def summarize_late_by_source(evidence: Evidence) -> pd.DataFrame:
    """Return one row per source: its late rows, in all and recently, and how late the recent were.

    A row counts if it was late for at least one output. Sources that the spec no longer has are
    there as well if the late table has rows of them. Lateness and lag are in seconds.
    """
    late = evidence.select_recent(evidence.late).to_pandas()
    every, recent = evidence.count_rows()
    # Sources that were taken out of the spec still have rows in the tables.
    strangers = sorted(set(evidence.late["_source"].to_pylist()) - set(evidence.spec.sources))
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
        names = (source, "yes" if spec else "no")
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
    late = evidence.select_recent(evidence.late).select(["output", "reason", "lateness_us"])
    grouped = late.to_pandas().groupby(["output", "reason"], sort=True)["lateness_us"]
    found = grouped.agg(["size", "min", "median", "max"]).reset_index()
    # The others are late for another cause than the frontier.
    judged = found["reason"].isin(["late_order", "late_window", "flagged"])
    frame: pd.DataFrame = found[["reason", "output"]].assign(rows=found["size"])
    for name in ("min", "median", "max"):
        lateness = found[name].astype("float64") / _TICKS_PER_SECOND
        frame[f"lateness_{name}_s"] = lateness.where(judged)
    return frame


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
    """One row per barrier that closed recently."""
    frame = _join_tardy_reports(evidence.barriers)
    return frame[frame["epoch"] > evidence.recent_since].reset_index(drop=True)


def summarize_barrier_health(evidence: Evidence) -> pd.DataFrame:
    """One row over all barriers; waits, in seconds, and missing ids are of the recent ones."""
    closed, newest = _join_tardy_reports(evidence.barriers), summarize_barriers(evidence)
    ids = set(newest["barrier_id"])
    complete, outcomes = Counter(closed["outcome"])["complete"], Counter(newest["outcome"])
    return pd.DataFrame(
        [
            {
                "pipeline": evidence.spec.name,
                "barriers": len(closed),
                "complete": complete,
                "complete_ratio": _compute_ratio(complete, len(closed)),
                "recent_barriers": len(newest),
                "recent_complete": outcomes["complete"],
                "recent_incomplete": outcomes["incomplete"],
                "recent_aborted": outcomes["aborted"],
                "recent_complete_ratio": _compute_ratio(outcomes["complete"], len(newest)),
                "waited_p50_s": _compute_quantile(newest["waited_s"], 0.50),
                "waited_p99_s": _compute_quantile(newest["waited_s"], 0.99),
                "complete_p99_s": _compute_quantile(
                    newest.loc[newest["outcome"] == "complete", "waited_s"], 0.99
                ),
                "ids_missing": max(ids) - min(ids) + 1 - len(ids) if ids else 0,
            }
        ]
    )


def summarize_barrier_types(evidence: Evidence) -> pd.DataFrame:
    """One row per type of barrier: how the recent barriers of that type closed.

    A barrier to which the members brought several types counts for each of them.
    """
    newest = summarize_barriers(evidence)
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for types, outcome in zip(newest["types"], newest["outcome"], strict=True):
        for kind in next(csv.reader([types]), ()):  # an aborted one may have no type yet
            outcomes[kind][outcome] += 1
    return _make_frame(
        "type barriers complete incomplete aborted complete_ratio",
        [
            (
                *(kind, found.total(), found["complete"], found["incomplete"], found["aborted"]),
                found["complete"] / found.total(),
            )
            for kind, found in sorted(outcomes.items())
        ],
    )


def summarize_barrier_members(evidence: Evidence) -> pd.DataFrame:
    """One row per member: how it took part in the barriers that closed recently.

    `held_p99_s` is the time, in seconds, for which the member was the only one that the others
    waited for; null if it was never the last of several.
    """
    newest = summarize_barriers(evidence)
    arrived: Counter[str] = Counter()
    held: defaultdict[str, list[float]] = defaultdict(list)
    for text in newest["participants"]:
        participants = json.loads(text or "{}")
        arrived.update([*participants])
        order = sorted((one["arrived"], member) for member, one in participants.items())
        if len(order) > 1:
            (before, _), (after, last) = order[-2:]
            held[last].append((after - before) / _TICKS_PER_SECOND)
    missing, tardy = (
        Counter(m for names in newest[column] for m in names.split(", ") if m)
        for column in ("missing", "tardy")
    )
    closed = max(len(newest), 1)
    return _make_frame(
        "member arrived last missing tardy missing_ratio tardy_ratio held_p99_s",
        [
            (
                *(m, arrived[m], len(held[m]), missing[m], tardy[m]),
                *(missing[m] / closed, tardy[m] / closed),
                _compute_quantile(held[m], 0.99),
            )
            for m in sorted({*arrived, *missing, *tardy})
        ],
    )


def summarize_freshness(evidence: Evidence) -> pd.DataFrame:
    """One row per source: time from the arrival of objects until recent epochs sealed them.

    In seconds. An epoch counts with the oldest object that it read of the source.
    """
    waits: dict[str, list[float]] = {source: [] for source in evidence.spec.sources}
    for manifest in evidence.manifests:
        for source, arrived in manifest.find_oldest_arrivals().items():
            wait = max(0, manifest.created_at - arrived) / _TICKS_PER_SECOND
            waits.setdefault(source, []).append(wait)
    return _make_frame(
        "source epochs sealed_p50_s sealed_p95_s",
        [
            (source, len(found), *(_compute_quantile(found, q) for q in (0.50, 0.95)))
            for source, found in waits.items()
        ],
    )


def summarize_checkpoints(evidence: Evidence) -> pd.DataFrame:
    """One row per published checkpoint, oldest first.

    Of recent ones also how many attempts failed before it, and the bytes of the state that a
    restore reads.
    """
    table = evidence.checkpoints.to_pandas().sort_values("_epoch", ignore_index=True)
    # Rows in the order buffer were read earlier and leave later: both ends belong to the balance.
    retained_before = table["rows_retained"].shift(1, fill_value=0)
    out = table[_DISPOSITIONS].sum(axis=1)
    aborted = {m.slot: len(m.epoch_notes.aborted) for m in evidence.manifests}
    state = {m.slot: sum(file.bytes for file in m.segments) for m in evidence.manifests}
    return pd.DataFrame(
        {
            "checkpoint_id": table["checkpoint_id"],
            "epoch": table["_epoch"],
            "rows_read": table["rows_read"],
            "rows_late": table["rows_late"],
            "rows_unaccounted": table["rows_read"] + retained_before - out,
            "epochs_skipped": table["_epoch"].diff().fillna(table["_epoch"]) - 1,
            "epoch_s": table["epoch_ms"].astype("float64") / 1000,
            "seal_s": table["seal_ms"].astype("float64") / 1000,
            "aborted_attempts": table["_epoch"].map(aborted).astype("float64"),
            "state_bytes": table["_epoch"].map(state).astype("float64"),
        }
    )


def summarize_checkpoint_health(evidence: Evidence) -> pd.DataFrame:
    """Return one row for the pipeline: number, age and state of its published checkpoints.

    It has the age of the newest (null unless `Evidence.wanted`) and whether its objects exist,
    quantiles of the durations of recent epochs and seals, and how many sealed slots are not
    published. Gaps and the row equation are in `summarize_checkpoints`.
    """
    table = summarize_checkpoints(evidence)
    recent = table[table["epoch"] > evidence.recent_since]
    head = evidence.head
    # A stopped pipeline grows older without being ill.
    sealed_at = head.created_at if head and evidence.wanted else np.nan
    return pd.DataFrame(
        [
            {
                "pipeline": evidence.spec.name,
                "checkpoints": len(table),
                "newest": str(head.id) if head else "none",
                "verified": evidence.verified,
                "age_s": (evidence.now - sealed_at) / _TICKS_PER_SECOND,
                "epoch_p95_s": _compute_quantile(recent["epoch_s"], 0.95),
                "seal_p95_s": _compute_quantile(recent["seal_s"], 0.95),
                "unpublished": evidence.sealed - (head.slot if head else 0),
            }
        ]
    )


def summarize_dead_letters(evidence: Evidence) -> pd.DataFrame:
    """One row per reason and source of recent dead letters: `rows`, and whole `objects`."""
    recent = evidence.select_recent(evidence.dead_letters)
    table = recent.select(["reason", "_source", "row"]).to_pandas()
    # A dead letter without a row is a whole object that could not be read.
    whole = table["row"].isna()
    counted = table.assign(source=table["_source"], rows=~whole, objects=whole)
    frame: pd.DataFrame = counted.groupby(["reason", "source"])[["rows", "objects"]].sum()
    return frame.reset_index()


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
    event_time = event_columns(evidence.spec)[-1]
    events = evidence.events.sort_by("position")
    position = events["position"].to_numpy()
    rows = len(position)
    distinct = int((np.diff(position) != 0).sum()) + 1 if rows else 0
    origin = events.group_by([*ORIGIN]).aggregate([])
    return pd.DataFrame(
        [
            {
                "pipeline": evidence.spec.name,
                "events": rows,
                "positions_missing": _count_expected_positions(evidence, position) - distinct,
                "positions_doubled": rows - distinct,
                "rows_doubled": rows - origin.num_rows,
                "rows_out_of_order": (
                    _count_out_of_order(events, event_time)
                    if evidence.spec.release.mode is not ReleaseMode.PASS_THROUGH
                    else np.nan
                ),
            }
        ]
    )


SUMMARIES: Final[Mapping[str, Callable[[Evidence], pd.DataFrame]]] = {
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


TABLE_PREFIX: Final = "table."
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


def name_rows(table: pa.Table) -> list[str]:
    """Return the origin of each row; its epoch and its number where it has none."""
    if {*ORIGIN} <= {*table.column_names}:
        return ["/".join(map(str, row.values())) for row in table.select(ORIGIN).to_pylist()]
    return [f"{epoch}:{n}" for n, epoch in enumerate(table["_epoch"].to_pylist())]


def _join_tardy_reports(table: pa.Table) -> pd.DataFrame:
    """One row per barrier, in order of closing.

    A tardy member writes the row of its barrier again, with the same section (docs/semantics.md,
    section 3.7). `closings` counts the closes of an id; more than one is a defect.
    """
    closes: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in table.sort_by("_epoch").to_pylist():
        key: tuple[Any, ...] = (row["barrier_id"], row["section"])
        first = closes.get(key)
        if first is not None and not row["tardy"]:
            key, first = (*key, len(closes)), None  # the same close twice, and no member was tardy
        closes[key] = {**row, "epoch": row["_epoch"] if first is None else first["epoch"]}
    counts = Counter(row["barrier_id"] for row in closes.values())
    rows = [
        (
            *(row["barrier_id"], row["epoch"], row["outcome"]),
            "yes" if row["homogeneous"] else "no",
            _format_csv_line(sorted(set(row["types"] or ()))),
            *(", ".join(row["missing"] or ()), len(row["missing"] or ())),
            *(", ".join(row["tardy"] or ()), len(row["tardy"] or ())),
            (row["waited_us"] or 0) / _TICKS_PER_SECOND,
            counts[row["barrier_id"]],
            row.get("participants"),
        )
        for row in closes.values()
    ]
    return _make_frame(
        "barrier_id epoch outcome homogeneous types missing missing_members tardy tardy_members"
        " waited_s closings participants",
        rows,
    )


def _format_csv_line(values: Iterable[str]) -> str:
    """The values, separated by commas; one that has a comma itself is quoted."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(values)
    return line.getvalue()


def _count_expected_positions(evidence: Evidence, position: np.ndarray[Any, Any]) -> int:
    """Positions that should be taken.

    Up to what the manifest has given out, from 0 or from where the events begin.
    """
    noted = evidence.head.next_position if evidence.head else 0
    if not len(position):
        return 0 if evidence.events_since else noted
    first = int(position[0]) if evidence.events_since else 0
    return max(int(position[-1]) + 1, noted) - first


def _count_out_of_order(events: pa.Table, event_time: str) -> int:
    """Rows that left after a later one of their section.

    Rows flagged late left out of turn by design.
    """
    flagged = events["_late"].fill_null(False).to_numpy()
    section = events["section"].to_numpy()[~flagged]
    time = events[event_time].cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_numpy()[~flagged]
    before = (section[1:] < section[:-1]) | ((section[1:] == section[:-1]) & (time[1:] < time[:-1]))
    return int(before.sum())


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
