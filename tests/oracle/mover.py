"""The oracle behind the Mover interface: `row_moves` with its state in segments of a store.

The Spark mover is compared with it, and the simulation and the engine's tests run on it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tests.oracle.edges import EDGES_KIND, load_edges, save_edges
from tests.oracle.glom import GLOM_KIND, built_schema, load_group, save_group
from tests.oracle.objects import ObjectReader
from tests.oracle.order_buffer import drop_released, load_buffer, save_buffer
from tests.oracle.row_moves import LateRow, Placed, RowMoves, RowState, WindowState
from tests.oracle.rows import BadRow, RawRow, SliceRows, read_rows
from tests.oracle.tables import dead_schema, events_schema, late_schema, window_schema, write_rows
from tests.oracle.window_state import load_windows, save_windows
from tests.oracle.windows import WindowFold
from tests.oracle.zero_rows import load_gaps, save_gaps
from tidegate.checkpoints.bucket_layout import AttemptFolders
from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult, Slice, SurveyedCut
from tidegate.jobs.eventtime.decision_types import Member, ReleaseMark, Survey
from tidegate.jobs.spec.pipeline import BUILT, DEAD_LETTERS, EVENT_TIME, EVENTS, LATE, PipelineSpec
from tidegate.time_units import TICK_MIN, saturate_ticks

# Of one kind: more than this are gathered into one, so that an epoch reads a bounded number of
# files.
_MANY_SEGMENTS = 4


class RowReader(Protocol):
    """Gives the rows of a slice again, as often as asked."""

    def rows(self, part: Slice) -> Iterable[RawRow]:
        """Rows with ``start <= seq < end`` in order."""
        ...


@dataclass
class _Written:
    """The files that one epoch writes."""

    files: dict[str, tuple[FileRef, ...]] = field(default_factory=dict)
    segments: list[FileRef] = field(default_factory=list)  # of the state, kept ones included
    new: list[FileRef] = field(default_factory=list)

    def add_segment(self, ref: FileRef) -> None:
        self.segments.append(ref)
        self.new.append(ref)


class OracleMover:
    """Moves rows as decided, in plain Python.

    Args:
        store: where segments and table files go, and where object sources lie unless `readers` says
            otherwise.
        spec: the pipeline.
        readers: source -> who gives its rows (a `MemorySource`, an `ObjectReader` on another
            store).
    """

    def __init__(
        self, store: Store, spec: PipelineSpec, readers: Mapping[str, RowReader] | None = None
    ) -> None:
        self._store = store
        self._spec = spec
        self._readers = {
            name: ObjectReader(store, source) for name, source in spec.sources.items()
        } | dict(readers or {})

    def survey(
        self, cut: Cut, state: Mapping[str, Any], *_: AttemptFolders | ReleaseMark | int | None
    ) -> SurveyedCut:
        """Summarise the cut; `move` reads the rows again with the same state."""
        members = tuple(self._read(part, state).survey for part in cut.slices)
        if not self._spec.release.limits_adjusted_rows:
            members = tuple(replace(member, newest_end=TICK_MIN) for member in members)
        return SurveyedCut(cut, Survey(now=0, members=members), staged=state)

    def move(self, order: MoveOrder, surveyed: SurveyedCut) -> MoveResult:
        """Write released rows, late rows, window results, dead letters and new state segments."""
        slices = [self._read(part, surveyed.staged) for part in surveyed.cut.slices]
        state = self._load_state(order)
        buffered_before = len(state.buffer)
        moves = RowMoves(self._spec, state)
        moves.judge(slices, order.decision)
        moves.leave(order.decision)
        written = _Written()
        self._save_state(moves, order, written)
        self._write_tables(moves, slices, order, written)
        marks = [
            placed.mark
            for placed, flagged in moves.released
            if not flagged and self._spec.outputs.events
        ]
        return MoveResult(
            files=written.files,
            segments=tuple(written.segments),
            counters=_count_rows(moves, slices, buffered_before),
            released_max=max(marks, default=None),
            next_position=state.position,
            bytes_written=sum(ref.bytes for ref in written.new),
        )

    def close(self) -> None:
        """Nothing to give back."""

    def _read(self, part: Slice, state: Mapping[str, Any]) -> SliceRows:
        source = self._spec.sources[part.member.source]
        return read_rows(source, part, self._readers[part.member.source].rows(part), state)

    # State.

    def _load_state(self, order: MoveOrder) -> RowState:
        waiting = (
            Placed(row, section, tardy)
            for section, row, tardy in load_buffer(self._store, _of_kind(order, "order"))
        )
        return RowState(
            buffer=[p for p in waiting if p.mark >= order.decision.release_before],
            group=load_group(self._store, _of_kind(order, GLOM_KIND)),
            edges=load_edges(self._store, self._spec, _of_kind(order, EDGES_KIND)),
            windows={name: self._load_window(name, order) for name in self._spec.windows},
            position=order.next_position,
        )

    def _load_window(self, name: str, order: MoveOrder) -> WindowState:
        segments, gaps = _window_segments(name, order)
        keys = self._spec.windows[name].keys
        return WindowState(
            load_windows(self._store, segments, keys), load_gaps(self._store, gaps, keys)
        )

    def _save_state(self, moves: RowMoves, order: MoveOrder, written: _Written) -> None:
        self._save_buffer(moves, order, written)
        folders, state = order.folders, moves.state
        if self._spec.release.glom is not None:
            written.add_segment(save_group(self._store, folders.segment_key("glom"), state.group))
        if state.edges:
            key = folders.segment_key("edges")
            written.add_segment(save_edges(self._store, key, self._spec, state.edges))
        for name, fold in moves.folds.items():
            self._save_window(name, fold, order, written)

    def _save_buffer(self, moves: RowMoves, order: MoveOrder, written: _Written) -> None:
        """Keep segments that still hold a row; add one with the epoch's rows that wait."""
        segments = drop_released(_of_kind(order, "order"), order.decision.release_after)
        waiting = moves.kept
        if len(segments) >= _MANY_SEGMENTS:
            segments, waiting = [], moves.state.buffer
        written.segments += segments
        if waiting:
            rows = [(p.section, p.row, p.tardy) for p in waiting]
            key = order.folders.segment_key("order")
            written.add_segment(save_buffer(self._store, key, self._spec, rows))

    def _save_window(
        self, name: str, fold: WindowFold, order: MoveOrder, written: _Written
    ) -> None:
        """Keep segments with a window that lives; add one with the windows that changed."""
        segments = [
            s
            for s in _window_segments(name, order)[0]
            if s.max_time is not None and not fold.purged(s.max_time, fold.after)
        ]
        changed = [w for w in fold.touched.values() if not fold.purged(w.end, fold.after)]
        if len(segments) >= _MANY_SEGMENTS:
            segments, changed = [], list(fold.live.values())
        written.segments += segments
        key, kind, keys = order.folders.segment_key(name), f"window:{name}", fold.window.keys
        if changed:
            written.add_segment(save_windows(self._store, key, kind, self._spec, keys, changed))
        if fold.gaps:
            key = order.folders.segment_key(f"{name}-gaps")
            written.add_segment(save_gaps(self._store, key, kind, self._spec, keys, fold.gaps))

    # Tables.

    def _write_tables(
        self, moves: RowMoves, slices: Sequence[SliceRows], order: MoveOrder, written: _Written
    ) -> None:
        epoch = {"_timeline": order.timeline, "_epoch": order.epoch}
        if self._spec.outputs.events:
            events = _event_rows(moves, order)
            self._write_table(EVENTS, events_schema(self._spec), events, order, written, EVENT_TIME)
        if (options := self._spec.release.glom) is not None:
            built = [{**group.row(options), **epoch} for group in moves.built]
            self._write_table(BUILT, built_schema(), built, order, written, "stamp")
        dead = [_dead_row(bad, order) for rows in slices for bad in rows.dead]
        self._write_table(DEAD_LETTERS, dead_schema(), dead, order, written)
        for name, window in self._spec.windows.items():
            results = [{**result, **epoch} for result in moves.results[name]]
            schema = window_schema(self._spec, window)
            self._write_table(name, schema, results, order, written, "window_end")
        late = [_late_row(late, order) for late in moves.late]
        self._write_table(LATE, late_schema(self._spec), late, order, written, EVENT_TIME)

    def _write_table(
        self,
        table: str,
        schema: Any,
        rows: Sequence[dict[str, Any]],
        order: MoveOrder,
        written: _Written,
        time: str | None = None,
    ) -> None:
        if not rows:
            return
        key = f"{order.folders.table_prefix(table)}part-0.parquet"
        times = [row[time] for row in rows] if time else []
        ref = write_rows(self._store, key, f"table:{table}", schema, rows, times)
        written.files[table] = (ref,)
        written.new.append(ref)


def _of_kind(order: MoveOrder, kind: str) -> list[FileRef]:
    return [segment for segment in order.segments if segment.kind == kind]


def _window_segments(name: str, order: MoveOrder) -> tuple[list[FileRef], list[FileRef]]:
    """Segments with windows, and those with gaps."""
    segments = _of_kind(order, f"window:{name}")
    gaps = [segment for segment in segments if segment.extra.get("gaps")]
    return [segment for segment in segments if not segment.extra.get("gaps")], gaps


def _event_rows(moves: RowMoves, order: MoveOrder) -> list[dict[str, Any]]:
    return [
        {
            **placed.row.values,
            EVENT_TIME: placed.row.time,
            "position": order.next_position + number,
            "section": placed.section,
            "_late": flagged or placed.tardy,
            **_provenance(placed.row.member, placed.row.seq, order),
        }
        for number, (placed, flagged) in enumerate(moves.released)
    ]


def _late_row(late: LateRow, order: MoveOrder) -> dict[str, Any]:
    known = late.frontier != TICK_MIN
    return {
        **late.row.values,
        EVENT_TIME: late.row.time,
        "output": late.output,
        "reason": late.reason,
        "lateness_us": saturate_ticks(late.frontier - late.row.time) if known else None,
        "frontier": late.frontier if known else None,
        **_provenance(late.row.member, late.row.seq, order),
    }


def _dead_row(bad: BadRow, order: MoveOrder) -> dict[str, Any]:
    return {
        "reason": bad.reason,
        "detail": bad.detail,
        "object": bad.raw.object_key,
        "etag": bad.raw.etag,
        "row": json.dumps(bad.raw.values, default=str, sort_keys=True),
        **_provenance(bad.member, bad.raw.seq, order),
    }


def _count_rows(
    moves: RowMoves, slices: Sequence[SliceRows], buffered_before: int
) -> EpochCounters:
    for rows in slices:
        if rows.read:
            moves.tally.setdefault(rows.survey.member.source, Counter())["read"] += rows.read
    total = sum(moves.tally.values(), Counter[str]())
    overflowed = {name: fold.overflowed for name, fold in moves.folds.items() if fold.overflowed}
    # Named only if there are any: `make faults` runs this on code that does not count them.
    newer: dict[str, Any] = {"overflowed": overflowed} if overflowed else {}
    return EpochCounters(
        read=total["read"],
        released=total["released"],
        late=total["late"],
        rejected=total["rejected"],
        dead_lettered=total["dead_lettered"],
        rule_quarantined=total["rule_quarantined"],
        filtered=total["filtered"],
        retained_before=buffered_before,
        retained=len(moves.state.buffer),
        dropped=dict(+moves.dropped),
        late_by_output=dict(moves.late_by_output),
        windows={name: len(results) for name, results in moves.results.items() if results},
        **newer,
        per_source={source: dict(counts) for source, counts in sorted(moves.tally.items())},
    )


def _provenance(member: Member, seq: int, order: MoveOrder) -> dict[str, Any]:
    return {
        "_source": member.source,
        "_partition": member.partition,
        "_seq": seq,
        "_timeline": order.timeline,
        "_epoch": order.epoch,
    }
