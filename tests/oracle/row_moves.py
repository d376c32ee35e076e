"""Where the rows of one epoch go, in plain Python and in memory.

This is the oracle's only implementation of the rules about rows: lateness, order, built events,
edges and windows (docs/semantics.md, sections 2, 3 and 5). `Model` applies it under its own
decisions; `OracleMover` applies it behind the Mover interface, under the decisions it is given,
and keeps the state in segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.oracle.edges import EdgeBook
from tests.oracle.glom import Group, Left, build
from tests.oracle.rows import BadRow, Row, SliceRows, adjusted
from tests.oracle.window_state import Key, Live
from tests.oracle.windows import WindowFold
from tests.oracle.zero_rows import Gaps
from tidegate.errors import PoisonError
from tidegate.jobs.eventtime.decision_types import Decision, ReleaseMark
from tidegate.jobs.spec.event_time_options import LatePolicy, ReleaseMode
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.jobs.spec.table_layout import LateReason
from tidegate.time_units import TICK_MIN


@dataclass(frozen=True, slots=True)
class Placed:
    """A row and the section it was read in."""

    row: Row
    section: int
    tardy: bool = False  # read before a tardy barrier: it leaves in order, but flagged

    @property
    def mark(self) -> ReleaseMark:
        """Its place in the ordered release."""
        return ReleaseMark(self.section, self.row.time)


@dataclass(frozen=True, slots=True)
class LateRow:
    """A row of the late table, and the frontier that it missed."""

    row: Row
    output: str
    reason: LateReason
    frontier: int


@dataclass
class WindowState:
    """What one window output keeps from epoch to epoch: live windows, and gaps for zero rows."""

    live: dict[tuple[Key, int, int], Live] = field(default_factory=dict)
    gaps: dict[Key, Gaps] = field(default_factory=dict)


@dataclass
class RowState:
    """What the rows of earlier epochs left behind.

    Attributes:
        buffer: rows that wait for their release.
        group: the built event that grows.
        edges: start edges without an end.
        windows: window -> its state.
        position: of the next event.
    """

    buffer: list[Placed] = field(default_factory=list)
    group: Group = field(default_factory=Group)
    edges: list[Row] = field(default_factory=list)
    windows: dict[str, WindowState] = field(default_factory=dict)
    position: int = 0


@dataclass
class RowMoves:
    """One epoch. Call `judge`, then `leave`; `state` is changed in place.

    Attributes:
        released: (row, flagged late) in the order in which they leave.
        kept: rows of this epoch that wait.
        late: rows of the late table.
        dropped: reason -> rows.
        built: built events that are finished.
        folds: window -> the epoch's work on it.
        results: window -> its results.
        tally: source -> disposition -> rows.
    """

    spec: PipelineSpec
    state: RowState
    released: list[tuple[Placed, bool]] = field(default_factory=list)
    kept: list[Placed] = field(default_factory=list)
    late: list[LateRow] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    late_by_output: Counter[str] = field(default_factory=Counter)
    built: list[Group] = field(default_factory=list)
    folds: dict[str, WindowFold] = field(default_factory=dict)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    tally: dict[str, Counter[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rank = {name: number for number, name in enumerate(self.spec.sources)}
        self._missed: set[tuple[str, str, int]] = set()
        self._data: list[Row] = []
        self._flagged: list[Placed] = []

    def judge(self, slices: Iterable[SliceRows], decision: Decision) -> list[Placed]:
        """Set late and broken rows aside by the frontier before the epoch.

        Returns the rows that were accepted for the events output.

        Raises:
            PoisonError: a row is late, and its policy is `error`.
        """
        for rows in slices:
            self._set_aside(rows, decision)
            self._data += rows.data
        self._data.sort(key=self.arrival)
        self.kept = []
        for row in self._data:
            placed = Placed(row, decision.section, str(row.member) in decision.flagged)
            if placed.tardy:
                self.count(row, "tardy")
            if not _is_late(placed, decision):
                self.kept.append(placed)
            elif self.spec.release.on_late is LatePolicy.EMIT_FLAGGED:
                self._flagged.append(placed)
                self._side_output(row, EVENTS, "flagged", decision.events_frontier)
                self.count(row, "flagged")
            elif (moved := self._adjusted(row, decision)) is not None:
                self.kept.append(replace(placed, row=moved))
            else:
                self._late_event(row, decision)
        return self.kept

    def leave(self, decision: Decision) -> None:
        """Release rows, build events and fire windows by the frontier after the epoch.

        Raises:
            PoisonError: a row is late for a window, and its policy is `error`.
        """
        self._release(decision.release_after)
        self._build_events(decision.release_after)
        self.state.position += len(self.released)
        book = EdgeBook(self.spec, self.state.edges)
        rows = book.take(self._data, decision.frontier_before)
        self.state.edges = book.open
        for name in self.spec.windows:
            self._fire_window(name, rows, book, decision)

    def arrival(self, row: Row) -> tuple[Any, ...]:
        """Order of reading: source order, partition, position."""
        return self._rank.get(row.member.source, len(self._rank)), row.member.partition, row.seq

    def count(self, row: Row | BadRow, disposition: str) -> None:
        """Count a row under its source."""
        self.tally.setdefault(row.member.source, Counter())[disposition] += 1

    def _miss(self, row: Row) -> None:
        """Count a row that is late for an output, unless another output has counted it."""
        who = (row.member.source, row.member.partition, row.seq)
        if who not in self._missed:
            self._missed.add(who)
            self.count(row, "late_rows")

    def _by_time(self, row: Row) -> tuple[Any, ...]:
        return row.time, *self.arrival(row)

    def _leaving(self, placed: Placed) -> tuple[Any, ...]:
        return placed.section, *self._by_time(placed.row)

    # Rows that go nowhere else.

    def _set_aside(self, rows: SliceRows, decision: Decision) -> None:
        for row in rows.quarantined:
            self._side_output(row, EVENTS, "max_jump", decision.frontier_before)
            self.count(row, "late")
            self.count(row, "late:events:max_jump")
        for row, mark in rows.violations:
            if self.spec.release.on_late is LatePolicy.ERROR:
                raise self._refusal(row, EVENTS, mark)
            self._side_output(row, EVENTS, "cti_violation", mark)
            self.count(row, "late")
            self.count(row, "late:events:cti_violation")
        for row in rows.dropped:
            self._miss(row)
            self.dropped["cti_violation"] += 1
            self.count(row, "dropped")
            self.count(row, "dropped:events:cti_violation")
        for bad in rows.dead:
            quarantined = bad.reason == "rule_quarantined"
            self.count(bad, bad.reason if quarantined else "dead_lettered")
        if rows.rule_dropped:
            self.dropped["rule"] += rows.rule_dropped
        tally = Counter({"dropped": rows.rule_dropped, "dropped:events:rule": rows.rule_dropped})
        tally = +(tally + rows.broken + Counter({"filtered": rows.filtered}))
        if tally:
            self.tally.setdefault(rows.survey.member.source, Counter()).update(tally)

    def _side_output(self, row: Row, output: str, reason: LateReason, frontier: int) -> None:
        self._miss(row)
        self.late_by_output[output] += 1
        self.late.append(LateRow(row, output, reason, frontier))

    def _refusal(self, row: Row, output: str, frontier: int) -> PoisonError:
        return PoisonError(
            f"{row.member} row {row.seq}: event time {row.time} is late for {output} (frontier"
            f" {frontier}), and on_late is error",
            code="row.late",
            pipeline=self.spec.name,
            kept="everything sealed so far",
            advice="choose another on_late policy, or correct the source",
        )

    def _adjusted(self, row: Row, decision: Decision) -> Row | None:
        start = max(
            decision.frontier_before, decision.order_late.time if decision.order_late else TICK_MIN
        )
        if self.spec.release.on_late is not LatePolicy.ADJUST or row.end <= start:
            return None
        return adjusted(row, start, self.spec.sources[row.member.source].event_time)

    def _late_event(self, row: Row, decision: Decision) -> None:
        policy = self.spec.release.on_late
        if policy is LatePolicy.ERROR:
            raise self._refusal(row, EVENTS, decision.events_frontier)
        if policy is LatePolicy.DROP:
            self._miss(row)
            self.dropped["late_order"] += 1
            self.count(row, "dropped")
            return
        rejected = policy is LatePolicy.REJECT_TO_ORIGIN
        reason: LateReason = "rejected" if rejected else "late_order"
        self._side_output(row, EVENTS, reason, decision.events_frontier)
        self.count(row, "rejected" if rejected else "late")

    # Order and built events.

    def _release(self, mark: ReleaseMark) -> None:
        """Rows below the mark leave, sorted; late ones that are emitted flagged leave first."""
        if self.spec.release.mode is ReleaseMode.PASS_THROUGH:
            leaving, self.kept = self.kept, []
        else:
            both = [*self.kept, *self.state.buffer]
            leaving = sorted((p for p in both if p.mark < mark), key=self._leaving)
            self.kept = [p for p in self.kept if p.mark >= mark]
            self.state.buffer = [p for p in self.state.buffer if p.mark >= mark] + self.kept
        self.released = [
            *((p, True) for p in sorted(self._flagged, key=self._leaving)),
            *((p, False) for p in leaving),
        ]
        for placed, _ in self.released:
            self.count(placed.row, "released")

    def _build_events(self, mark: ReleaseMark) -> None:
        """Group what left in order; rows that were emitted as late are in no built event."""
        options = self.spec.release.glom
        if options is None:
            return
        positions = enumerate(self.released, self.state.position)
        rows = [Left(*placed.mark, position) for position, (placed, late) in positions if not late]
        self.built, self.state.group = build(self.state.group, rows, options, mark)

    # Windows.

    def _fire_window(
        self, name: str, rows: Sequence[Row], book: EdgeBook, decision: Decision
    ) -> None:
        state = self.state.windows.setdefault(name, WindowState())
        fold = WindowFold(
            window=self.spec.windows[name],
            live=state.live,
            before=decision.frontier_before,
            after=decision.frontier_after,
            order=self._by_time,
            time_columns={name: s.event_time for name, s in self.spec.sources.items()},
            gaps=state.gaps,
        )
        fold.take(rows)
        for edge in book.closed:
            fold.hold(edge, None)
        for edge in book.open:
            fold.hold(edge, decision.open_edges_until)
        for row in fold.expired:
            self.count(row, f"expired:{name}")
        for row in fold.late:
            self._late_in_window(name, row, decision.frontier_before)
        self.folds[name], self.results[name] = fold, fold.emit()
        state.live = fold.live

    def _late_in_window(self, name: str, row: Row, frontier: int) -> None:
        policy = self.spec.windows[name].on_late
        if policy is LatePolicy.ERROR:
            raise self._refusal(row, name, frontier)
        if policy is LatePolicy.DROP:
            self._miss(row)
            self.late_by_output[name] += 1
            self.count(row, f"dropped:{name}")
            return
        reason: LateReason = "rejected" if policy is LatePolicy.REJECT_TO_ORIGIN else "late_window"
        self._side_output(row, name, reason, frontier)
        self.count(row, f"late:{name}")
        if reason == "rejected":
            self.count(row, f"late:{name}:rejected")


def _is_late(placed: Placed, decision: Decision) -> bool:
    if decision.order_late is None:
        return False
    if decision.order_late_by_time:
        return placed.row.time < decision.order_late.time
    return placed.mark < decision.order_late
