"""Runs a sealed epoch again from its manifest and compares the results.

Rule: docs/semantics.md, section 9.9.

From the same cut, clocks and requests the decider must come to the same decision. From the same
cut, decision and state segments the tables must hold the same rows. Nothing is sealed, and the
replayed files go to a scratch store.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.epoch_engine import EpochPorts
from tidegate.jobs.engine.interfaces import MoveOrder, MoveResult, RowDispatcher
from tidegate.jobs.engine.recorded_epochs import RecordedEpoch
from tidegate.jobs.engine.resume_state import SPLICE_KIND
from tidegate.jobs.spec.pipeline import PipelineSpec


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        checkpoint: the epoch's id.
        tables: table -> (rows sealed, rows replayed, rows that only one side has). A row that one
            side has more often counts for each time, and a row with another value on both sides.
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
        parent: the epoch or merge before it on its lineage; None for the first.
        ports: these read inputs and segments from `sealed` and write to `scratch`. Sources are not
            asked; a dispatcher is needed if the spec has streams.
        sealed: where the pipeline lies.
        scratch: where rows are written.

    Raises:
        NotFoundError: a file of the epoch is gone.
    """
    recorded = RecordedEpoch(spec, epoch, parent)
    order = rebuild_move_order(recorded)
    surveyed = ports.mover.survey(order.cut, recorded.state_before)
    # Rows are moved by the sealed decision, not by the new one: if the two differ, the tables still
    # tell whether the mover is right.
    _, differences = recorded.decide_again(recorded.complete_survey(surveyed.survey))
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
        tables[table] = (
            before.total(),
            after.total(),
            ((before - after) + (after - before)).total(),
        )
    return ReplayResult(str(epoch.id), tables, differences)


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


def rebuild_move_order(epoch: RecordedEpoch) -> MoveOrder:
    """Return the order that the mover was given."""
    parent, manifest = epoch.parent, epoch.manifest
    return MoveOrder(
        cut=epoch.rebuild_cut(),
        decision=epoch.sealed_decision,
        segments=tuple(s for s in parent.segments if s.kind != SPLICE_KIND) if parent else (),
        folders=AttemptFolders(BucketLayout(manifest.pipeline), manifest.id),
        next_position=parent.next_position if parent else 0,
    )


def _read_rows_as_text(store: Store, files: Any) -> Counter[str]:
    """Rows as text, each with its number: rows are compared, not files.

    Provenance is part of a row.
    """
    rows: Counter[str] = Counter()
    for file in files:
        table = pq.read_table(pa.BufferReader(store.get(file.key).data))
        rows.update(repr(sorted(row.items())) for row in table.to_pylist())
    return rows


FLOAT_TOLERANCE: Final = 1e-9
"""Relative tolerance of doubles, absolute below 1: a sum of doubles depends on its order."""


def values_differ(left: Any, right: Any) -> bool:
    """Return whether two values differ; doubles, also in lists, may differ by `FLOAT_TOLERANCE`.

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
