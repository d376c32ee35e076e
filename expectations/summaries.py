"""Small pandas frames that the suites look at, computed from the tables and manifests.

Pure: no store, no Spark, no GX.

Every frame exists for every pipeline, with its columns, also when there is nothing to say; a null
means *does not apply* and passes value checks. Quantiles are computed here because GX 1.24's own
quantile expectation cannot store its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from tidegate.checkpoints.manifest import Manifest
from tidegate.jobs.spec.event_time_options import LatePolicy, ReleaseMode
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec

LATE_COLUMNS: Final = ("output", "reason", "lateness_us", "_source", "_epoch")
"""The columns of the late table that the checks need."""

_TICKS_PER_SECOND: Final = 1_000_000
_LATE_TABLE_POLICIES: Final = {
    LatePolicy.SIDE_OUTPUT,
    LatePolicy.REJECT_TO_ORIGIN,
}  # policies under which every late row reaches the late table
_DISPOSITIONS: Final = [
    "rows_released",
    "rows_late",
    "rows_dropped",
    "rows_rejected",
    "rows_dead",
    "rows_retained",
]


def event_columns(spec: PipelineSpec) -> tuple[str, ...]:
    """The columns of the events table that the checks need.

    It is the one table that is never small.
    """
    event_time = spec.event_time_column
    return ("position", "section", "_late", "_source", "_partition", "_seq", "_epoch", event_time)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the checks look at: one consistent cut through the tables, and two manifests.

    Attributes:
        late: late table, and so on; all rows up to the epoch of `head`.
        head: manifest of the newest epoch that the tables show; None before the first.
        past: manifest `quality.recent` epochs before it; None if there are not that many, or it was
            retired.
        sealed: slot of the newest sealed epoch, published or not.
        now: ticks.
        events_since: the events table is there from the epoch after this one.
        wanted: somebody wants this stream to run now, so that an old checkpoint means something.
        verified: verdict on the objects that `head` needs, by presence and size; ``none`` before
            the first.
    """

    spec: PipelineSpec
    late: pa.Table
    barriers: pa.Table
    checkpoints: pa.Table
    dead_letters: pa.Table
    events: pa.Table
    events_since: int
    head: Manifest | None
    past: Manifest | None
    sealed: int
    now: int
    wanted: bool
    verified: str


def summarize_late_by_source(evidence: Evidence) -> pd.DataFrame:
    """One row per source.

    Late rows of the events output as the manifests count them, and their lateness.
    """
    late = evidence.late.select(["output", "_source", "lateness_us"]).to_pandas()
    late = late[late["output"] == EVENTS]
    counted = _get_source_counters(evidence.head)
    past = _get_source_counters(evidence.past)
    complete = evidence.spec.release.on_late in _LATE_TABLE_POLICIES
    rows = []
    for source in [
        *evidence.spec.sources,
        *sorted(set(late["_source"]) - set(evidence.spec.sources)),
    ]:
        lateness = (
            late.loc[late["_source"] == source, "lateness_us"].to_numpy(
                dtype="float64", na_value=np.nan
            )
            / _TICKS_PER_SECOND
        )
        now, before = counted.get(source, {}), past.get(source, {})
        rows.append(
            {
                "source": source,
                "source_in_spec": "yes" if source in evidence.spec.sources else "no",
                "rows_read": now.get("read", 0),
                "rows_late": _count_late_rows(now),
                "late_ratio": _compute_ratio(_count_late_rows(now), now.get("read", 0)),
                "late_ratio_rise": _compute_late_rise(now, before),
                "lateness_p50_s": _compute_quantile(lateness, 0.50),
                "lateness_p99_s": _compute_quantile(lateness, 0.99),
                "lateness_max_s": _compute_quantile(lateness, 1.0),
                "late_rows_missing": (
                    float(_count_late_rows(now) - len(lateness)) if complete else np.nan
                ),
            }
        )
    return pd.DataFrame(rows)


def summarize_late_by_reason(evidence: Evidence) -> pd.DataFrame:
    """One row per output and reason."""
    late = evidence.late.select(["output", "reason", "lateness_us"]).to_pandas()
    grouped = late.groupby(["output", "reason"], sort=True)["lateness_us"]
    found = grouped.agg(["size", "min", "median", "max"]).reset_index()
    judged = found["reason"].isin(
        ["late_order", "late_window"]
    )  # the others are late for another cause than the frontier
    frame = pd.DataFrame(
        {"reason": found["reason"], "output": found["output"], "rows": found["size"]}
    )
    for name in ("min", "median", "max"):
        frame[f"lateness_{name}_s"] = (found[name].astype("float64") / _TICKS_PER_SECOND).where(
            judged
        )
    return frame


def summarize_barriers(evidence: Evidence) -> pd.DataFrame:
    """One row per closed barrier."""
    table = evidence.barriers
    return pd.DataFrame(
        {
            "barrier_id": table["barrier_id"].to_pylist(),
            "outcome": table["outcome"].to_pylist(),
            "homogeneous": ["yes" if h else "no" for h in table["homogeneous"].to_pylist()],
            "types": [", ".join(sorted(set(t or ()))) for t in table["types"].to_pylist()],
            "missing": [", ".join(m or ()) for m in table["missing"].to_pylist()],
            "missing_members": [len(m or ()) for m in table["missing"].to_pylist()],
            "tardy_members": [len(t or ()) for t in table["tardy"].to_pylist()],
            "waited_s": [(w or 0) / _TICKS_PER_SECOND for w in table["waited_us"].to_pylist()],
        }
    )


def summarize_barrier_health(evidence: Evidence) -> pd.DataFrame:
    """One row over all barriers."""
    closed = summarize_barriers(evidence)
    ids = set(closed["barrier_id"])
    return _make_single_row(
        {
            "pipeline": evidence.spec.name,
            "barriers": len(closed),
            "complete": int((closed["outcome"] == "complete").sum()),
            "complete_ratio": _compute_ratio(
                int((closed["outcome"] == "complete").sum()), len(closed)
            ),
            "waited_p50_s": _compute_quantile(closed["waited_s"].to_numpy("float64"), 0.50),
            "waited_p99_s": _compute_quantile(closed["waited_s"].to_numpy("float64"), 0.99),
            "ids_missing": max(ids) - min(ids) + 1 - len(ids) if ids else 0,
        }
    )


def summarize_checkpoints(evidence: Evidence) -> pd.DataFrame:
    """One row per published checkpoint, oldest first."""
    table = evidence.checkpoints.to_pandas().sort_values("_epoch", ignore_index=True)
    retained_before = table["rows_retained"].shift(1, fill_value=0)
    out = table[_DISPOSITIONS].sum(axis=1)
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
        }
    )


def summarize_checkpoint_health(evidence: Evidence) -> pd.DataFrame:
    """One row over all checkpoints."""
    table = summarize_checkpoints(evidence)
    head = evidence.head
    age = (
        (evidence.now - head.created_at) / _TICKS_PER_SECOND if head and evidence.wanted else np.nan
    )
    return _make_single_row(
        {
            "pipeline": evidence.spec.name,
            "checkpoints": len(table),
            "newest": str(head.id) if head else "none",
            "verified": evidence.verified,
            "age_s": age,
            "epoch_p95_s": _compute_quantile(table["epoch_s"].to_numpy("float64"), 0.95),
            "seal_p95_s": _compute_quantile(table["seal_s"].to_numpy("float64"), 0.95),
            "unpublished": evidence.sealed - (head.slot if head else 0),
        }
    )


def summarize_dead_letters(evidence: Evidence) -> pd.DataFrame:
    """One row per reason and source; `objects` were unreadable as a whole."""
    table = evidence.dead_letters.select(["reason", "_source", "row"]).to_pandas()
    whole = table["row"].isna()
    found = (
        table.assign(rows=~whole, objects=whole)
        .groupby(["reason", "_source"], sort=True)[["rows", "objects"]]
        .sum()
    )
    frame: pd.DataFrame = found.reset_index().rename(columns={"_source": "source"})
    return frame


def summarize_dead_letter_health(evidence: Evidence) -> pd.DataFrame:
    """One row over all dead letters."""
    found = summarize_dead_letters(evidence)
    rows, read = int(found["rows"].sum()), evidence.head.counters.read if evidence.head else 0
    return _make_single_row(
        {
            "pipeline": evidence.spec.name,
            "rows_read": read,
            "dead_rows": rows,
            "dead_ratio": _compute_ratio(rows, read),
            "dead_objects": int(found["objects"].sum()),
        }
    )


def summarize_release(evidence: Evidence) -> pd.DataFrame:
    """One row over the events table."""
    event_time = event_columns(evidence.spec)[-1]
    events = evidence.events.sort_by("position")
    position = events["position"].to_numpy()
    rows = len(position)
    distinct = int((np.diff(position) != 0).sum()) + 1 if rows else 0
    origin = events.group_by(["_source", "_partition", "_seq"]).aggregate([])
    return _make_single_row(
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
    )


SUMMARIES: Final[Mapping[str, Callable[[Evidence], pd.DataFrame]]] = {
    "late_by_source": summarize_late_by_source,
    "late_by_reason": summarize_late_by_reason,
    "barriers": summarize_barriers,
    "barrier_health": summarize_barrier_health,
    "checkpoints": summarize_checkpoints,
    "checkpoint_health": summarize_checkpoint_health,
    "dead_letters": summarize_dead_letters,
    "dead_letter_health": summarize_dead_letter_health,
    "release": summarize_release,
}
"""Name of a summary in a suite file -> how it is built. The first column names the row."""


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


def _make_single_row(row: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame([row])


def _get_source_counters(manifest: Manifest | None) -> dict[str, dict[str, int]]:
    return manifest.counters.per_source if manifest else {}


def _count_late_rows(counters: Mapping[str, int]) -> int:
    return counters.get("late", 0) + counters.get("rejected", 0)


def _compute_late_rise(now: Mapping[str, int], before: Mapping[str, int]) -> float:
    """Late share of what came since `before`, less that of what came up to it.

    Null without enough of both.
    """
    recent_read = now.get("read", 0) - before.get("read", 0)
    if not before.get("read") or recent_read <= 0:
        return np.nan
    return (_count_late_rows(now) - _count_late_rows(before)) / recent_read - _count_late_rows(
        before
    ) / before["read"]


def _compute_ratio(part: int, whole: int) -> float:
    return part / whole if whole else np.nan


def _compute_quantile(values: np.ndarray[Any, Any], q: float) -> float:
    known = values[~np.isnan(values)]
    return float(np.quantile(known, q)) if len(known) else np.nan
