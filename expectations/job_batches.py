"""What the suites of a job look at: its recent sealed batches, computed from manifests without I/O.

Spark reports these figures. It counts dropped rows after partial aggregation, so a share of dropped
rows is the least that it can be. A null means *does not apply*, or that Spark's report was lost; it
passes value checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

import numpy as np
import pandas as pd

from tidegate.checkpoints.batch_notes import BatchNotes
from tidegate.checkpoints.manifest import Manifest
from tidegate.jobs.spec.job_spec import JobSpec

MOST_MANIFESTS = 200
"""Batches of a slice that are looked at; one GET each."""
_TICKS_PER_SECOND = 1_000_000


@dataclass(frozen=True)
class JobEvidence:
    """What the checks of a job look at.

    Attributes:
        head: manifest of the newest batch; None before the first.
        recent_since: batches in slots after this one are recent.
        manifests: of the recent batches, oldest first.
        now: ticks.
        is_older: it is about a slice before the newest batches.
    """

    spec: JobSpec
    head: Manifest | None
    recent_since: int
    manifests: Sequence[Manifest]
    now: int
    is_older: bool = False


def count_slice_batches(spec: JobSpec, newest: Manifest | None) -> int:
    """Return how many batches are recent, at most 200; 0 before the first."""
    notes = BatchNotes.from_manifest(newest)
    return min(spec.quality.recent * len(notes.queries), MOST_MANIFESTS) if notes else 0


def summarize_batches(manifests: Iterable[Manifest]) -> pd.DataFrame:
    """One row per recent batch, oldest first.

    `busy` is its duration as a share of the interval that its trigger asks for; `backlog` counts
    the messages that its sources still hold; `watermark_delay_s` is how far the watermark was
    behind the clock when the batch was sealed.
    """
    rows = []
    for manifest in manifests:
        notes = BatchNotes.from_manifest(manifest)
        if notes is None:
            continue
        at, name = notes.queries[notes.query], notes.query
        counts = at.model_dump(include={"rows", "dropped", "state_rows", "state_bytes"})
        if at.seconds is None:  # the report was lost, and what it counts is not known
            counts = dict.fromkeys(counts)
        backlogs = [source.backlog for source in at.sources if source.backlog is not None]
        delay = None if at.watermark is None else manifest.created_at - at.watermark
        rows.append(
            {
                "batch": f"{name}/{at.batch}",
                "epoch": manifest.slot,
                "query": name,
                **counts,
                "seconds": at.seconds,
                "busy": at.seconds / at.interval if at.seconds and at.interval else None,
                "backlog": sum(backlogs) if backlogs else None,
                "watermark": at.watermark,
                "watermark_delay_s": None if delay is None else delay / _TICKS_PER_SECOND,
            }
        )
    columns = (
        "batch epoch query rows seconds busy dropped backlog state_rows state_bytes watermark"
        " watermark_delay_s"
    )
    frame = pd.DataFrame(rows, columns=columns.split())
    return frame.astype(dict.fromkeys(frame.columns[3:], "float64"))


def summarize_queries(manifests: Iterable[Manifest]) -> pd.DataFrame:
    """One row per query, over its recent batches.

    `state_growth` is the median size of the state in the newer half of the batches, as a multiple
    of that in the older half. `watermark_still` counts the newest batches that read rows while the
    watermark did not move, `backlog_rising` those at which the backlog has grown without a break.
    """
    batches = summarize_batches(manifests)
    rows = []
    for query, own in batches.groupby("query"):
        with_rows = own.loc[(own["rows"] > 0) & own["watermark"].notna(), "watermark"]
        backlog = own["backlog"].dropna()
        state = own["state_bytes"].dropna()
        half = len(state) // 2
        older, newer = state.iloc[:half].median(), state.iloc[half:].median()
        rows.append(
            (
                *(query, len(own), own["seconds"].quantile(0.95), own["busy"].quantile(0.95)),
                min(1.0, own["dropped"].sum() / read) if (read := own["rows"].sum()) else np.nan,
                newer / older if older else np.nan,
                state.iloc[-1] if len(state) else np.nan,
                _count_newest(with_rows, lambda before, after: after <= before),
                _count_newest(backlog, lambda before, after: after > before),
            )
        )
    columns = "query batches seconds_p95 busy_p95 dropped_ratio state_growth state_bytes"
    return pd.DataFrame(rows, columns=[*columns.split(), "watermark_still", "backlog_rising"])


def _count_newest(values: pd.Series[float], holds: Callable[[float, float], bool]) -> int:
    """Count the newest steps from a value to the next one for which something holds."""
    steps = [*pairwise(values)][::-1]
    return len([*takewhile(lambda step: holds(*step), steps)])


JOB_SUMMARIES: Mapping[str, Callable[[Iterable[Manifest]], pd.DataFrame]] = {
    "batches": summarize_batches,
    "queries": summarize_queries,
}
"""Name of a summary in a suite file of jobs -> how it is built from the recent manifests."""
