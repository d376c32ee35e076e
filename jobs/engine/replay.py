"""Runs a sealed epoch again from its manifest and compares the results.

Rule: docs/semantics.md, section 9.9.

Same cut, same decision, same state segments: the tables must hold the same rows. Nothing is sealed,
and the replayed files go to a scratch store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, Mover, MoveResult, RowDispatcher
from tidegate.jobs.engine.resume_state import SPLICE_KIND
from tidegate.jobs.eventtime.decider import create_initial_state
from tidegate.jobs.eventtime.decision_types import Decision
from tidegate.jobs.spec.pipeline import PipelineSpec


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Table -> (rows sealed, rows replayed, rows that differ)."""

    checkpoint: str
    tables: dict[str, tuple[int, int, int]]

    @property
    def is_equal(self) -> bool:
        """Every table came out the same."""
        return all(difference == 0 for _, _, difference in self.tables.values())


def replay_epoch(
    spec: PipelineSpec,
    epoch: Manifest,
    parent: Manifest | None,
    mover: Mover,
    sealed: Store,
    scratch: Store,
    dispatch: RowDispatcher | None = None,
) -> ReplayResult:
    """Move one sealed epoch again and compare its tables.

    Args:
        spec: the pipeline as it was when the epoch was sealed.
        epoch: the epoch to replay.
        parent: the epoch before it on its lineage; None for the first.
        mover: reads inputs and segments from `sealed` and writes to `scratch`.
        sealed: where the pipeline lies.
        scratch: where the mover writes.
        dispatch: who sends rows to streams, reading and writing where the mover does; needed if the
            spec has streams.
    """
    order = rebuild_move_order(epoch, parent)
    state = parent.decider if parent else create_initial_state(spec)
    moved = mover.move(order, mover.survey(order.cut, state))
    files = {
        **moved.files,
        **(_replay_dispatch(dispatch, order, moved, epoch, parent) if dispatch else {}),
    }
    tables = {}
    for table in sorted({*epoch.files, *files} - {"barriers"}):
        before = _read_rows_as_text(sealed, _select_mover_files(epoch.files.get(table, [])))
        after = _read_rows_as_text(scratch, files.get(table, ()))
        tables[table] = (len(before), len(after), len(before ^ after))
    return ReplayResult(str(epoch.id), tables)


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


def rebuild_move_order(epoch: Manifest, parent: Manifest | None) -> MoveOrder:
    """The order that the mover was given."""
    return MoveOrder(
        cut=Cut.from_record(epoch.cut),
        decision=Decision.from_record(epoch.decision, epoch.decider),
        segments=tuple(s for s in parent.segments if s.kind != SPLICE_KIND) if parent else (),
        folders=AttemptFolders(BucketLayout(epoch.pipeline), epoch.id),
        next_position=parent.next_position if parent else 0,
    )


def _select_mover_files(files: list[FileRef]) -> list[FileRef]:
    return [
        f for f in files if not f.extra.get("small")
    ]  # dead objects are written by the driver, not by the mover


def _read_rows_as_text(store: Store, files: Any) -> set[str]:
    """Rows as text: equality of rows, not of files. Provenance is part of a row."""
    rows: set[str] = set()
    for file in files:
        table = pq.read_table(pa.BufferReader(store.get(file.key).data))
        rows.update(repr(sorted(row.items())) for row in table.to_pylist())
    return rows
