"""Runs a sealed epoch again from its manifest and compares the results.

Rule: docs/semantics.md, section 9.9.

From the same cut, clocks and requests the decider must come to the same decision. From the same
cut, decision and state segments the tables must hold the same rows. Nothing is sealed, and the
replayed files go to a scratch store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout
from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.epoch_engine import EpochPorts
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult, RowDispatcher, Slice
from tidegate.jobs.engine.resume_state import SPLICE_KIND
from tidegate.jobs.eventtime.decider import create_initial_state, decide
from tidegate.jobs.eventtime.decision_types import BarrierOutcome, Decision, ReleaseMark, Survey
from tidegate.jobs.eventtime.pipeline_clock import read_pipeline_time
from tidegate.jobs.spec.pipeline import PipelineSpec


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        checkpoint: the epoch.
        tables: table -> (rows sealed, rows replayed, rows that differ).
        decided_differently: fields of the decision that differ; `after` is the decider's state.
    """

    checkpoint: str
    tables: dict[str, tuple[int, int, int]]
    decided_differently: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether the decision and every table are equal."""
        return not self.decided_differently and all(
            difference == 0 for _, _, difference in self.tables.values()
        )


def replay_epoch(
    spec: PipelineSpec,
    epoch: Manifest,
    parent: Manifest | None,
    ports: EpochPorts,
    sealed: Store,
    scratch: Store,
) -> ReplayResult:
    """Decide and move one sealed epoch again, and compare its decision and its tables.

    Args:
        spec: the pipeline as it was when the epoch was sealed.
        epoch: the epoch to replay.
        parent: the epoch before it on its lineage; None for the first.
        ports: these read inputs and segments from `sealed` and write to `scratch`. Sources are not
            asked; a dispatcher is needed if the spec has streams.
        sealed: where the pipeline lies.
        scratch: where rows are written.
    """
    order = rebuild_move_order(spec, epoch, parent)
    state = parent.decider if parent else create_initial_state(spec)
    surveyed = ports.mover.survey(order.cut, state)
    # Rows are moved by the sealed decision, not by the new one: if the two differ, the tables still
    # tell whether the mover is right.
    decided = decide(spec, state, _rebuild_survey(surveyed.survey, epoch, parent))
    moved = ports.mover.move(order, surveyed)
    written = [moved.files, ports.driver_tables(order)]
    if ports.dispatcher is not None:
        written.append(_replay_dispatch(ports.dispatcher, order, moved, epoch, parent))
    files: dict[str, list[FileRef]] = {}
    for found in written:
        for table, refs in found.items():
            files.setdefault(table, []).extend(refs)
    tables = {}
    for table in sorted({*epoch.files, *files}):
        before = _read_rows_as_text(sealed, epoch.files.get(table, ()))
        after = _read_rows_as_text(scratch, files.get(table, ()))
        tables[table] = (len(before), len(after), len(before ^ after))
    return ReplayResult(str(epoch.id), tables, _compare_decisions(decided, order.decision))


def _rebuild_survey(survey: Survey, epoch: Manifest, parent: Manifest | None) -> Survey:
    """Complete a survey with what the epoch knew besides its rows, as the engine did."""
    time = read_pipeline_time(epoch.decider)
    before = read_pipeline_time(parent.decider) if parent else None
    released = parent.epoch_notes.released_max if parent else None
    decision = Decision.from_record(epoch.decision, epoch.decider)
    cancels = [entry["id"] for entry in decision.recorded if entry["kind"] == "cancel_barriers"]
    ctis = [entry for entry in decision.recorded if entry["kind"] == "cti"]
    return replace(
        survey,
        # The wall clock as far as it was recorded. If it had gone back, it decided nothing.
        now=time.wall if time else epoch.recorded_now,
        worked=time.clock - before.clock if time and before else None,
        buffered_rows=parent.counters.retained if parent else 0,
        released_max=ReleaseMark(*released) if released else None,
        # The manifest names requests by id only. An abort that changed anything shows here.
        aborts=tuple(
            one.id
            for one in decision.barriers
            if one.outcome is BarrierOutcome.ABORTED and one.id > max(cancels, default=one.id - 1)
        ),
        cancels=tuple(cancels),
        ctis=tuple((entry["source"], entry["time"]) for entry in ctis),
        run_start=parent is None or epoch.epoch_notes.run > parent.epoch_notes.run,
    )


def _compare_decisions(decided: Decision, sealed: Decision) -> tuple[str, ...]:
    """Return the fields that differ, in the form that the manifest has."""
    one, other = (
        parse_json(
            canonical_bytes(
                {
                    **found.to_record(),
                    "after": found.after,
                    # Members are judged one after the other; their order says nothing.
                    "recorded": sorted(found.recorded, key=canonical_bytes),
                }
            )
        )
        for found in (decided, sealed)
    )
    return tuple(sorted(name for name in one if one[name] != other.get(name)))


def _replay_dispatch(
    dispatch: RowDispatcher,
    order: MoveOrder,
    moved: MoveResult,
    epoch: Manifest,
    parent: Manifest | None,
) -> dict[str, tuple[FileRef, ...]]:
    before = parent.stream_state if parent else {}
    asked = [(verb, name) for verb, name in epoch.stream_state.get("asked", [])]
    return dispatch.dispatch_rows(order, moved, before, asked).files


def rebuild_move_order(spec: PipelineSpec, epoch: Manifest, parent: Manifest | None) -> MoveOrder:
    """Return the order that the mover was given for a sealed epoch.

    The cut of a manifest is unordered and also names members that are gone. Here it has the members
    that the epoch read, in the order in which they were planned.
    """
    live = epoch.decider["members"]
    cut = Cut.from_record({name: part for name, part in epoch.cut.items() if name in live})
    return MoveOrder(
        cut=Cut(tuple(sorted(cut.slices, key=partial(_rank_slice, list(spec.sources))))),
        decision=Decision.from_record(epoch.decision, epoch.decider),
        segments=tuple(s for s in parent.segments if s.kind != SPLICE_KIND) if parent else (),
        folders=AttemptFolders(BucketLayout(epoch.pipeline), epoch.id),
        next_position=parent.next_position if parent else 0,
    )


def _rank_slice(sources: list[str], part: Slice) -> tuple[int, int, str]:
    """Sort by source as in the spec, then by partition; numbers by value."""
    partition = part.member.partition
    number = int(partition) if partition.isdigit() else -1
    return sources.index(part.member.source), number, partition


def _read_rows_as_text(store: Store, files: Any) -> set[str]:
    """Rows as text: equality of rows, not of files. Provenance is part of a row."""
    rows: set[str] = set()
    for file in files:
        table = pq.read_table(pa.BufferReader(store.get(file.key).data))
        rows.update(repr(sorted(row.items())) for row in table.to_pylist())
    return rows


FLOAT_TOLERANCE: Final = 1e-9
"""Relative tolerance of doubles, absolute below 1: a sum of doubles depends on its order."""


def values_differ(left: Any, right: Any) -> bool:
    """Return whether two values differ; doubles, also in lists, may differ by rounding.

    >>> values_differ([1.0, float("nan")], [1.0 + 1e-12, float("nan")])
    False
    >>> values_differ(None, 0.0)
    True
    """
    if isinstance(left, float) and isinstance(right, float):
        if math.isnan(left) or math.isnan(right):
            return math.isnan(left) != math.isnan(right)
        return not math.isclose(left, right, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) != len(right) or any(map(values_differ, left, right))
    return bool(left != right)
