"""The reference mover: the Mover protocol on plain Python rows, kept simple and obviously right.

It is what the Spark mover is compared with and what the simulation runs on. Everything is held in
memory for one epoch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tests.oracle.edges import EDGES_KIND, EdgeBook, load_edges, save_edges
from tests.oracle.glom import GLOM_KIND, Left, build, built_schema, load_group, save_group
from tests.oracle.objects import ObjectReader
from tests.oracle.order_buffer import drop_released, load_buffer, save_buffer
from tests.oracle.rows import BadRow, RawRow, Row, SliceRows, adjusted, read_rows
from tests.oracle.tables import dead_schema, events_schema, late_schema, window_schema, write_rows
from tests.oracle.window_state import load_windows, save_windows
from tests.oracle.windows import WindowFold
from tests.oracle.zero_rows import load_gaps, save_gaps
from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.errors import PoisonError
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult, Slice, SurveyedCut
from tidegate.jobs.eventtime.decision_types import Decision, Member, ReleaseMark, Survey
from tidegate.jobs.spec.event_time_options import LatePolicy, ReleaseMode
from tidegate.jobs.spec.pipeline import BUILT, DEAD_LETTERS, EVENT_TIME, EVENTS, LATE, PipelineSpec
from tidegate.jobs.spec.row_reasons import LateReason
from tidegate.time_units import TICK_MIN, saturate_ticks

# Of one kind: more than this are gathered into one, so that an epoch reads a bounded number of
# files.
_MANY_SEGMENTS = 4


class RowReader(Protocol):
    """Gives the rows of a slice again, as often as asked."""

    def rows(self, part: Slice) -> Iterable[RawRow]:
        """Rows with ``start <= seq < end`` in order."""
        ...


@dataclass(frozen=True, slots=True)
class _Placed:
    """A row and the section it was read in."""

    row: Row
    section: int
    tardy: bool = False  # read before a tardy barrier: it leaves in order, but flagged

    @property
    def mark(self) -> ReleaseMark:
        return ReleaseMark(self.section, self.row.time)


@dataclass(frozen=True, slots=True)
class _Joining:
    """What joins the windows in an epoch.

    Rows, open edges up to an instant, edges that have ended.
    """

    rows: Sequence[Row]
    open: Sequence[Row]
    closed: Sequence[Row]
    until: int


@dataclass
class _Epoch:
    """What one epoch gathers."""

    late: list[dict[str, Any]] = field(default_factory=list)
    tally: dict[str, Counter[str]] = field(default_factory=dict)  # source -> disposition -> rows
    dropped: Counter[str] = field(default_factory=Counter)
    late_by_output: Counter[str] = field(default_factory=Counter)
    files: dict[str, tuple[FileRef, ...]] = field(default_factory=dict)
    segments: list[FileRef] = field(default_factory=list)
    written: list[FileRef] = field(default_factory=list)

    def count(self, row: Row | BadRow, disposition: str) -> None:
        self.tally.setdefault(row.member.source, Counter())[disposition] += 1

    def total(self, disposition: str) -> int:
        return sum(counts[disposition] for counts in self.tally.values())


class ReferenceMover:
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
        self._rank = {name: number for number, name in enumerate(spec.sources)}

    def survey(self, cut: Cut, state: Mapping[str, Any]) -> SurveyedCut:
        """Summarise the cut; `move` reads the rows again with the same state."""
        members = tuple(self._read(part, state).survey for part in cut.slices)
        return SurveyedCut(cut, Survey(now=0, members=members), staged=state)

    def move(self, order: MoveOrder, surveyed: SurveyedCut) -> MoveResult:
        """Write released rows, late rows, window results, dead letters and new state segments."""
        epoch = _Epoch()
        slices = [self._read(part, surveyed.staged) for part in surveyed.cut.slices]
        for rows in slices:
            self._set_aside(rows, order, epoch)
        data = sorted((row for rows in slices for row in rows.data), key=self._arrival)
        released, buffered_before, buffered = self._release(data, order, epoch)
        self._glom(released, order, epoch)
        self._write_dead([bad for rows in slices for bad in rows.dead], order, epoch)
        edges = self._edges(data, order, epoch)
        windows = {name: self._window(name, edges, order, epoch) for name in self._spec.windows}
        self._table(LATE, late_schema(self._spec), epoch.late, order, epoch, EVENT_TIME)
        marks = [
            placed.mark for placed, flagged in released if not flagged and self._spec.outputs.events
        ]
        return MoveResult(
            files=epoch.files,
            segments=tuple(epoch.segments),
            counters=self._counters(slices, epoch, windows, buffered_before, buffered),
            released_max=max(marks, default=None),
            next_position=order.next_position + len(released),
            buffered_rows=buffered,
            bytes_written=sum(ref.bytes for ref in epoch.written),
        )

    def close(self) -> None:
        """Nothing to give back."""

    def _read(self, part: Slice, state: Mapping[str, Any]) -> SliceRows:
        source = self._spec.sources[part.member.source]
        return read_rows(source, part, self._readers[part.member.source].rows(part), state)

    def _arrival(self, row: Row) -> tuple[Any, ...]:
        return self._rank.get(row.member.source, len(self._rank)), row.member.partition, row.seq

    def _by_time(self, row: Row) -> tuple[Any, ...]:
        return row.time, *self._arrival(row)

    def _leaving(self, placed: _Placed) -> tuple[Any, ...]:
        return placed.section, *self._by_time(placed.row)

    # rows that go nowhere else

    def _set_aside(self, rows: SliceRows, order: MoveOrder, epoch: _Epoch) -> None:
        for row in rows.quarantined:
            self._side_output(row, EVENTS, "max_jump", order, epoch)
            epoch.count(row, "late")
        for row, mark in rows.violations:
            if self._spec.release.on_late is LatePolicy.ERROR:
                raise self._refusal(row, EVENTS, mark)
            self._side_output(row, EVENTS, "cti_violation", order, epoch, mark)
            epoch.count(row, "late")
        for row in rows.dropped:
            epoch.dropped["cti_violation"] += 1
            epoch.count(row, "dropped")
        for bad in rows.dead:
            epoch.count(bad, "dead_lettered")

    def _side_output(
        self,
        row: Row,
        output: str,
        reason: LateReason,
        order: MoveOrder,
        epoch: _Epoch,
        missed: int | None = None,
    ) -> None:
        frontier = order.decision.frontier_before if missed is None else missed
        known = frontier != TICK_MIN
        epoch.late_by_output[output] += 1
        epoch.late.append(
            {
                **row.values,
                EVENT_TIME: row.time,
                "output": output,
                "reason": reason,
                "lateness_us": saturate_ticks(frontier - row.time) if known else None,
                "frontier": frontier if known else None,
                **_provenance(row.member, row.seq, order),
            }
        )

    def _refusal(self, row: Row, output: str, frontier: int) -> PoisonError:
        return PoisonError(
            f"{row.member} row {row.seq}: event time {row.time} is late for {output} (frontier"
            f" {frontier}), and on_late is error",
            code="row.late",
            pipeline=self._spec.name,
            kept="everything sealed so far",
            advice="choose another on_late policy, or mend the source",
        )

    def _write_dead(self, dead: Sequence[BadRow], order: MoveOrder, epoch: _Epoch) -> None:
        rows = [
            {
                "reason": bad.reason,
                "detail": bad.detail,
                "object": bad.raw.object_key,
                "etag": bad.raw.etag,
                "row": json.dumps(bad.raw.values, default=str, sort_keys=True),
                **_provenance(bad.member, bad.raw.seq, order),
            }
            for bad in dead
        ]
        self._table(DEAD_LETTERS, dead_schema(), rows, order, epoch)

    # the events output

    def _release(
        self, data: Sequence[Row], order: MoveOrder, epoch: _Epoch
    ) -> tuple[list[tuple[_Placed, bool]], int, int]:
        """Judge rows for the events output.

        Returns (row, flagged late) in order, rows buffered before and after.
        """
        decision = order.decision
        flagged, accepted = self._judge(data, order, epoch)
        if self._spec.release.mode is ReleaseMode.PASS_THROUGH:
            now, later = accepted, []
        else:
            now = [p for p in accepted if p.mark < decision.release_after]
            later = [p for p in accepted if p.mark >= decision.release_after]
        segments = [s for s in order.segments if s.kind == "order"]
        waiting = [
            _Placed(row, section, tardy)
            for section, row, tardy in load_buffer(self._store, segments)
            if ReleaseMark(section, row.time) >= decision.release_before
        ]
        leaving = [p for p in waiting if p.mark < decision.release_after]
        if self._spec.release.mode is not ReleaseMode.PASS_THROUGH:
            now = sorted([*now, *leaving], key=self._leaving)
        released = [
            *((p, True) for p in sorted(flagged, key=self._leaving)),
            *((p, False) for p in now),
        ]
        if self._spec.outputs.events:
            self._write_events(released, order, epoch)
        buffered = len(waiting) - len(leaving) + len(later)
        kept = drop_released(segments, decision.release_after)
        if len(kept) >= _MANY_SEGMENTS:
            later += [p for p in waiting if p.mark >= decision.release_after]
            kept = []
        epoch.segments += kept
        if later:
            rows = [(p.section, p.row, p.tardy) for p in later]
            ref = save_buffer(self._store, order.folders.segment_key("order"), self._spec, rows)
            epoch.segments.append(ref)
            epoch.written.append(ref)
        for placed, _ in released:
            epoch.count(placed.row, "released")
        return released, len(waiting), buffered

    def _judge(
        self, data: Sequence[Row], order: MoveOrder, epoch: _Epoch
    ) -> tuple[list[_Placed], list[_Placed]]:
        """Split the epoch's rows into flagged late ones and accepted ones.

        Side-output, drop or adjust the other late ones.
        """
        flagged, accepted = [], []
        for row in data:
            placed = _Placed(row, order.decision.section, str(row.member) in order.decision.flagged)
            if not _is_late(placed, order.decision):
                accepted.append(placed)
            elif self._spec.release.on_late is LatePolicy.EMIT_FLAGGED:
                flagged.append(placed)
            elif (moved := self._adjusted(row, order.decision)) is not None:
                accepted.append(replace(placed, row=moved))
            else:
                self._late_event(row, order, epoch)
        return flagged, accepted

    def _adjusted(self, row: Row, decision: Decision) -> Row | None:
        start = max(
            decision.frontier_before, decision.order_late.time if decision.order_late else TICK_MIN
        )
        if self._spec.release.on_late is not LatePolicy.ADJUST or row.end <= start:
            return None
        return adjusted(row, start, self._spec.sources[row.member.source].event_time)

    def _late_event(self, row: Row, order: MoveOrder, epoch: _Epoch) -> None:
        policy = self._spec.release.on_late
        if policy is LatePolicy.ERROR:
            raise self._refusal(row, EVENTS, order.decision.events_frontier)
        if policy is LatePolicy.DROP:
            epoch.dropped["late_order"] += 1
            epoch.count(row, "dropped")
            return
        rejected = policy is LatePolicy.REJECT_TO_ORIGIN
        reason: LateReason = "rejected" if rejected else "late_order"
        self._side_output(row, EVENTS, reason, order, epoch, order.decision.events_frontier)
        epoch.count(row, "rejected" if rejected else "late")

    def _write_events(
        self, released: Sequence[tuple[_Placed, bool]], order: MoveOrder, epoch: _Epoch
    ) -> None:
        rows = [
            {
                **placed.row.values,
                EVENT_TIME: placed.row.time,
                "position": order.next_position + number,
                "section": placed.section,
                "_late": flagged or placed.tardy,
                **_provenance(placed.row.member, placed.row.seq, order),
            }
            for number, (placed, flagged) in enumerate(released)
        ]
        self._table(EVENTS, events_schema(self._spec), rows, order, epoch, EVENT_TIME)

    def _glom(
        self, released: Sequence[tuple[_Placed, bool]], order: MoveOrder, epoch: _Epoch
    ) -> None:
        """Group what left in order into built events.

        Late rows, which leave at once, are in none.
        """
        options = self._spec.release.glom
        if options is None:
            return
        positions = enumerate(released, order.next_position)
        rows = [Left(*placed.mark, position) for position, (placed, late) in positions if not late]
        before = load_group(self._store, [s for s in order.segments if s.kind == GLOM_KIND])
        done, group = build(before, rows, options, order.decision.release_after)
        own = {"_timeline": order.timeline, "_epoch": order.epoch}
        self._table(
            BUILT,
            built_schema(),
            [{**one.row(options), **own} for one in done],
            order,
            epoch,
            "stamp",
        )
        ref = save_group(self._store, order.folders.segment_key("glom"), group)
        epoch.segments.append(ref)
        epoch.written.append(ref)

    # windows

    def _edges(self, data: Sequence[Row], order: MoveOrder, epoch: _Epoch) -> _Joining:
        """The rows that join the windows, and the edges among them; open edges are retained."""
        decision, segments = order.decision, [s for s in order.segments if s.kind == EDGES_KIND]
        book = EdgeBook(self._spec, load_edges(self._store, self._spec, segments))
        rows = book.take(data, decision.frontier_before)
        if book.open:
            ref = save_edges(
                self._store,
                order.folders.segment_key("edges"),
                self._spec,
                book.open,
            )
            epoch.segments.append(ref)
            epoch.written.append(ref)
        return _Joining(rows, book.open, book.closed, decision.open_edges_until)

    def _window(self, name: str, joining: _Joining, order: MoveOrder, epoch: _Epoch) -> int:
        """One window output; returns the number of results."""
        window, kind = self._spec.windows[name], f"window:{name}"
        segments = [s for s in order.segments if s.kind == kind and not s.extra.get("gaps")]
        gap_segments = [s for s in order.segments if s.kind == kind and s.extra.get("gaps")]
        fold = WindowFold(
            window=window,
            live=load_windows(self._store, segments, window.keys),
            before=order.decision.frontier_before,
            after=order.decision.frontier_after,
            order=self._by_time,
            time_columns={name: s.event_time for name, s in self._spec.sources.items()},
            gaps=load_gaps(self._store, gap_segments, window.keys),
        )
        fold.take(joining.rows)
        for edge in joining.closed:
            fold.hold(edge, None)
        for edge in joining.open:
            fold.hold(edge, joining.until)
        for row in fold.expired:
            epoch.count(row, f"expired:{name}")
        for row in fold.late:
            self._late_in_window(name, row, order, epoch)
        results = [
            {**result, "_timeline": order.timeline, "_epoch": order.epoch} for result in fold.emit()
        ]
        self._table(name, window_schema(self._spec, window), results, order, epoch, "window_end")
        kept = [
            s
            for s in segments
            if s.max_time is not None and not fold.purged(s.max_time, fold.after)
        ]
        changed = [w for w in fold.touched.values() if not fold.purged(w.end, fold.after)]
        if len(kept) >= _MANY_SEGMENTS:
            kept, changed = [], list(fold.live.values())
        epoch.segments += kept
        new = []
        if changed:
            new.append(
                save_windows(
                    self._store,
                    order.folders.segment_key(name),
                    kind,
                    self._spec,
                    window.keys,
                    changed,
                )
            )
        if fold.gaps:
            new.append(
                save_gaps(
                    self._store,
                    order.folders.segment_key(f"{name}-gaps"),
                    kind,
                    self._spec,
                    window.keys,
                    fold.gaps,
                )
            )
        epoch.segments += new
        epoch.written += new
        return len(results)

    def _late_in_window(self, name: str, row: Row, order: MoveOrder, epoch: _Epoch) -> None:
        policy = self._spec.windows[name].on_late
        if policy is LatePolicy.ERROR:
            raise self._refusal(row, name, order.decision.frontier_before)
        if policy is LatePolicy.DROP:
            epoch.late_by_output[name] += 1
            epoch.count(row, f"dropped:{name}")
            return
        reason: LateReason = "rejected" if policy is LatePolicy.REJECT_TO_ORIGIN else "late_window"
        self._side_output(row, name, reason, order, epoch)
        epoch.count(row, f"late:{name}")

    # files and counters

    def _table(
        self,
        table: str,
        schema: Any,
        rows: Sequence[dict[str, Any]],
        order: MoveOrder,
        epoch: _Epoch,
        time: str | None = None,
    ) -> None:
        if not rows:
            return
        times = [row[time] for row in rows] if time else []
        key = f"{order.folders.table_prefix(table)}part-0.parquet"
        ref = write_rows(self._store, key, f"table:{table}", schema, rows, times)
        epoch.files[table] = (ref,)
        epoch.written.append(ref)

    def _counters(
        self,
        slices: Sequence[SliceRows],
        epoch: _Epoch,
        windows: dict[str, int],
        before: int,
        after: int,
    ) -> EpochCounters:
        for rows in slices:
            if rows.read:
                epoch.tally.setdefault(rows.survey.member.source, Counter())["read"] += rows.read
        return EpochCounters(
            read=epoch.total("read"),
            released=epoch.total("released"),
            late=epoch.total("late"),
            rejected=epoch.total("rejected"),
            dead_lettered=epoch.total("dead_lettered"),
            retained_before=before,
            retained=after,
            dropped=dict(epoch.dropped),
            late_by_output=dict(epoch.late_by_output),
            windows={name: results for name, results in windows.items() if results},
            per_source={source: dict(counts) for source, counts in sorted(epoch.tally.items())},
        )


def _is_late(placed: _Placed, decision: Decision) -> bool:
    if decision.order_late is None:
        return False
    if decision.order_late_by_time:
        return placed.row.time < decision.order_late.time
    return placed.mark < decision.order_late


def _provenance(member: Member, seq: int, order: MoveOrder) -> dict[str, Any]:
    return {
        "_source": member.source,
        "_partition": member.partition,
        "_seq": seq,
        "_timeline": order.timeline,
        "_epoch": order.epoch,
    }
