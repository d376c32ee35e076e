"""Run a sealed epoch again from what its manifest recorded, and compare what comes out (semantics.md section 9.9).

Same cut, same decision, same state segments: the tables must hold the same rows. Nothing is sealed,
and the replayed files go to a scratch store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import (
    Cut,
    DeadObject,
    MoveOrder,
    Mover,
    MoveResult,
    RowDispatcher,
    Slice,
)
from tidegate.jobs.engine.resume_state import SPLICE_KIND
from tidegate.jobs.eventtime.decider import create_initial_state
from tidegate.jobs.eventtime.decision_types import (
    BarrierHealth,
    BarrierOutcome,
    Decision,
    Member,
    ReleaseMark,
)
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
    before = parent.notes.get("streams", {}) if parent else {}
    asked = [(verb, name) for verb, name in epoch.notes.get("streams", {}).get("asked", [])]
    return dispatch.dispatch_rows(order, moved, before, asked).files


def rebuild_move_order(epoch: Manifest, parent: Manifest | None) -> MoveOrder:
    """The order that the mover was given."""
    return MoveOrder(
        cut=cut_from_record(epoch.cut),
        decision=replace(decision_from_record(epoch.decision), after=epoch.decider),
        segments=tuple(s for s in parent.segments if s.kind != SPLICE_KIND) if parent else (),
        prefix=f"{epoch.pipeline}/timelines/{epoch.timeline}",
        tag=f"{epoch.slot:06d}-{epoch.attempt}",
        timeline=epoch.timeline,
        epoch=epoch.slot,
        next_position=parent.notes["next_position"] if parent else 0,
    )


def cut_from_record(record: Mapping[str, Any]) -> Cut:
    """A cut as its manifest recorded it."""
    return Cut(
        tuple(_slice_from_record(Member.parse(member), part) for member, part in record.items())
    )


def _slice_from_record(member: Member, part: Mapping[str, Any]) -> Slice:
    return Slice(
        member=member,
        start=part["start"],
        end=part["end"],
        parts=tuple(part["parts"]),
        resume=part["resume"],
        pending=part["pending"],
        done=part["done"],
        dead=tuple(DeadObject(**{**dead, "member": member}) for dead in part["dead"]),
    )


def decision_from_record(record: Mapping[str, Any]) -> Decision:
    """A decision as its manifest recorded it; without `after`."""
    mark: Callable[[Any], ReleaseMark | None] = lambda value: (
        ReleaseMark(*value) if value is not None else None
    )
    return Decision(
        **{
            **record,
            "order_late": mark(record["order_late"]),
            "release_before": ReleaseMark(*record["release_before"]),
            "release_after": ReleaseMark(*record["release_after"]),
            "barriers": tuple(_health_from_record(b) for b in record["barriers"]),
            "blocked": tuple(record["blocked"]),
            "emitted": tuple((kind, value) for kind, value in record["emitted"]),
            "recorded": tuple(record["recorded"]),
        }
    )


def _health_from_record(record: Mapping[str, Any]) -> BarrierHealth:
    listed = {name: tuple(record[name]) for name in ("types", "missing", "ended", "tardy")}
    arrivals = {
        member: (at, seq, time) for member, (at, seq, time) in record["participants"].items()
    }
    return BarrierHealth(
        **{
            **record,
            **listed,
            "outcome": BarrierOutcome(record["outcome"]),
            "participants": arrivals,
        }
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
