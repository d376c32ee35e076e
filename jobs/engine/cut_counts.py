"""Adds to an epoch's counters what follows from the planned cut rather than from the rows read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.checkpoints.row_counts import (
    COLUMNS_LEFT_OUT,
    DEAD_OBJECT_ROWS,
    DEAD_OBJECTS,
    NULLS_FILLED,
    PerSource,
    merge_counts,
)
from tidegate.jobs.engine.interfaces import Cut, Slice
from tidegate.jobs.spec.pipeline import PipelineSpec


def add_cut_counts(
    spec: PipelineSpec, cut: Cut, moved: EpochCounters, dispatched: PerSource
) -> EpochCounters:
    """Return the mover's counters with those of objects, columns and rows that streams rejected.

    Args:
        spec: the pipeline.
        cut: what the epoch read.
        moved: the mover's counters.
        dispatched: source -> name of a count -> rows that streams rejected.
    """
    found: dict[str, Counter[str]] = {}
    for part in cut.slices:
        for name, count in _count_slice(spec, part):
            if count:
                found.setdefault(part.member.source, Counter())[name] += count
    return replace(
        moved,
        dead_objects=sum(counts[DEAD_OBJECTS] for counts in found.values()),
        per_source=merge_counts(moved.per_source, found, dispatched),
    )


def _count_slice(spec: PipelineSpec, part: Slice) -> Iterator[tuple[str, int]]:
    declared = spec.sources[part.member.source].columns
    yield DEAD_OBJECTS, len(part.dead)
    yield DEAD_OBJECT_ROWS, sum(dead.rows or 0 for dead in part.dead)
    for read in part.parts:
        # Sources of the tests describe their parts without columns.
        found = read.get("columns", declared).keys() - {"_why", "_text"}
        rows = read["row_end"] - read["row_start"]
        yield NULLS_FILLED, rows if declared.keys() - found else 0
        yield COLUMNS_LEFT_OUT, rows if found - declared.keys() else 0
