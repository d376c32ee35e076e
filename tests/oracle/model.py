"""The oracle of the decisions: docs/semantics.md, sections 1 to 4, in plain Python.

It decides about one row at a time, keeps its state in memory and imports nothing of
`jobs/eventtime` but types. The decider must agree with it on equal cuts and recorded clocks. Where
the rows go under these decisions is the business of `row_moves`. One `epoch` is one cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.oracle.glom import Group
from tests.oracle.model_barriers import ClosedBarrier, ModelBarriers
from tests.oracle.model_frontier import Level
from tests.oracle.model_rows import ModelMember
from tests.oracle.row_moves import RowMoves, RowState
from tests.oracle.rows import PartitionReader, RawRow, Row, SliceRows
from tidegate.jobs.eventtime.decision_types import Decision, Member, ReleaseMark
from tidegate.jobs.spec.event_time_options import CoalesceOptions
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import TICK_MAX, TICK_MIN


@dataclass(frozen=True)
class Offer:
    """What the cut holds of one member: (seq, values) in order, and what is behind it."""

    rows: Sequence[tuple[int, Mapping[str, Any]]] = ()
    pending: bool = False
    done: bool = False


@dataclass
class Outcome:
    """What one epoch did.

    Attributes:
        consumed: member -> rows read, barriers and punctuation included.
        read: rows with a disposition.
        released: (section, row, flagged late) as they leave.
        late: (row, output, reason).
        dropped: reason -> rows.
        dead: (member, seq, reason).
        built: built events.
        windows: window -> results.
        expired: window -> (row, window) pairs that came after the purge.
        barriers: barriers that closed, and closed ones that a tardy member joined.
    """

    before: int
    after: int = TICK_MIN
    now: int = 0
    consumed: dict[str, int] = field(default_factory=dict)
    read: int = 0
    released: list[tuple[int, Row, bool]] = field(default_factory=list)
    late: list[tuple[Row, str, str]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    dead: list[tuple[Member, int, str]] = field(default_factory=list)
    built: list[Group] = field(default_factory=list)
    windows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    expired: Counter[str] = field(default_factory=Counter)
    barriers: list[ClosedBarrier] = field(default_factory=list)
    statuses: dict[str, str] = field(default_factory=dict)
    buffered: int = 0


@dataclass(frozen=True)
class _Waiting:
    """A row in the order buffer, and the clock and number of the epoch that read it."""

    mark: ReleaseMark
    read_at: int
    epoch: int


class Model:
    """One pipeline, from its beginning."""

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec
        self.clock: int | None = None
        self.wall: int | None = None  # greatest wall clock so far: gaps count in it
        self.members: dict[Member, ModelMember] = {}
        ends = {
            name: bool(source.punctuation and source.punctuation.advance_to_end)
            for name, source in spec.sources.items()
        }
        self.sources = {
            name: Level(source.coalesce, ends=ends[name]) for name, source in spec.sources.items()
        }
        self.output = Level(spec.coalesce, ends=all(ends.values()))
        self.active_at: dict[
            str, int
        ] = {}  # source -> pipeline clock of its last activity, or of its joining
        self.deaf: set[str] = (
            set()
        )  # idle sources that only punctuation came of, where that is ignored
        self.quiet: set[str] = set()  # sources silent for the output's timeout
        self.barriers = ModelBarriers(spec.barriers, spec.barrier_timeout)
        self.waiting: list[_Waiting] = []
        self.epochs = 0
        self.rows = RowState()
        self.left: ReleaseMark | None = None  # greatest (section, time) that was released
        self.reached = ReleaseMark(0, TICK_MIN)  # the section and its frontier
        self.mark = ReleaseMark(0, TICK_MIN)  # everything below it leaves; never backward
        self.run_began: int | None = None
        self.in_grace = spec.release.startup_grace > 0
        self.expired = TICK_MIN  # rows below this have stayed for the build window
        self.blocked: set[str] = set()  # members at an open barrier before the epoch

    def epoch(
        self,
        now: int,
        offers: Mapping[Member, Offer],
        *,
        run_start: bool = False,
        aborts: Sequence[int] = (),
        cancels: Sequence[int] = (),
        ctis: Sequence[tuple[str, int]] = (),
        worked: int | None = None,
    ) -> Outcome:
        """One cut: the steps of semantics.md section 1, "Inside an epoch"."""
        self.epochs += 1
        last_wall = self.wall
        if self.clock is None or last_wall is None:
            self.clock = self.wall = now
        else:
            gap = max(0, now - last_wall)
            step = min(gap, self.spec.checkpoint.max_clock_step) if worked is None else worked
            self.clock += step
            self.wall = max(last_wall, now, self.clock)
        if run_start:
            self.run_began, self.in_grace = None, self.spec.release.startup_grace > 0
        outcome = Outcome(
            before=TICK_MIN if self.output.frontier is None else self.output.frontier,
            now=self.clock,
        )
        section, self.blocked = self.barriers.section, self.barriers.list_blocked_members()
        slices, arrivals, active = self._read(offers, last_wall, outcome)
        for source, time in ctis:
            self._promise(source, time, active, dict(arrivals))
        data = [row for rows in slices for row in rows.data]
        self._statuses(offers, active)
        self._barriers(arrivals, aborts, cancels)
        decision = self._decide_lateness(section, outcome.before)
        moves = RowMoves(self.spec, self.rows)
        accepted = moves.judge(slices, decision)
        self.waiting += [_Waiting(placed.mark, self.clock, self.epochs) for placed in accepted]
        # A clock that was set back is in no record, so it decides nothing.
        self._frontiers(self.wall, data)
        outcome.after = TICK_MIN if self.output.frontier is None else self.output.frontier
        moves.leave(self._decide_release(decision, outcome.after))
        self._follow_released(moves)
        _report_moves(moves, outcome)
        outcome.barriers, self.barriers.closed = self.barriers.closed, []
        self.barriers.came_late = set()
        outcome.statuses = self._shown_statuses()
        return outcome

    # reading

    def _read(
        self, offers: Mapping[Member, Offer], last_wall: int | None, outcome: Outcome
    ) -> tuple[list[SliceRows], list[tuple[str, Any]], set[str]]:
        """Take each member's rows up to its barrier.

        Returns the rows of each member, barriers, and who was active.
        """
        slices: list[SliceRows] = []
        arrivals: list[tuple[str, Any]] = []
        active: set[str] = set()
        self.had_rows: set[str] = set()
        for gone in self.members.keys() - offers.keys():
            del self.members[gone]
            del self.sources[gone.source].inputs[str(gone)]
        for member, offer in offers.items():
            discovered = self.spec.sources[member.source].coalesce.members == "discovered"
            if discovered and member not in self.members and not offer.rows:
                continue
            slices.append(self._read_member(member, offer, last_wall, outcome, arrivals, active))
        if self.in_grace and self.run_began is None and active:
            self.run_began = self.clock
        return slices, arrivals, active

    def _read_member(
        self,
        member: Member,
        offer: Offer,
        last_wall: int | None,
        outcome: Outcome,
        arrivals: list[tuple[str, Any]],
        active: set[str],
    ) -> SliceRows:
        name, source = str(member), self.spec.sources[member.source]
        clock = self.clock or 0
        one = self.members.setdefault(member, ModelMember(member, source, clock))
        self.sources[member.source].join(name)
        # At least once: data flows on behind one open barrier, but not behind two.
        blocked = self.barriers.open_for(name) >= (
            1 if self.spec.barriers.alignment == "block" else 2
        )
        reader = PartitionReader(source, member, one.memory, last_wall)
        taken = 0
        for seq, values in () if blocked else offer.rows:
            reader.take(RawRow(seq, dict(values)))
            taken += 1
            if reader.barrier is not None:
                one.before_barrier[seq] = (reader.newest, reader.punctuation)
                arrivals.append((name, reader.barrier))
                break
        rows = reader.rows
        if rows.read or reader.barrier is not None:
            self.had_rows.add(name)
        if rows.read or reader.barrier is not None or reader.punctuation != one.punctuation:
            active.add(name)
            one.active_at = clock
        one.memory = reader.memory()
        outcome.consumed[name] = taken
        outcome.read += rows.read
        outcome.dead += [(member, bad.raw.seq, bad.reason) for bad in rows.dead]
        one.pending = offer.pending or taken < len(offer.rows)
        one.done = offer.done and taken == len(offer.rows)
        return rows

    def _promise(
        self, source: str, time: int, active: set[str], arrivals: Mapping[str, Any]
    ) -> None:
        """A CTI that a person sent: punctuation behind the rows that were read of each member.

        It is before a barrier row that ends them.
        """
        mark = time + (1 if self.spec.sources[source].frontier == "inclusive" else 0)
        for member, one in self.members.items():
            name = str(member)
            if member.source != source or self.sources[source].inputs[name].status == "done":
                continue
            if one.punctuation is None or mark > one.punctuation:
                one.memory = {**one.memory, "current": mark}
                one.active_at = self.clock or 0
                active.add(name)
                standing = [b.rows[name].seq for b in self.barriers.open if name in b.rows]
                if name in arrivals:
                    standing.append(arrivals[name].seq)
                elif len(standing) < 2:
                    continue  # behind the one that is open, or behind none
                one.before_barrier[max(standing)] = (one.before_barrier[max(standing)][0], mark)
        if self.in_grace and self.run_began is None and active:
            self.run_began = self.clock

    # who is there

    def _statuses(self, offers: Mapping[Member, Offer], active: set[str]) -> None:
        """Idle: nothing pending and silent for the timeout. Activity ends idleness."""
        for member, one in self.members.items():
            level, name = self.sources[member.source], str(member)
            status = level.inputs[name].status
            if status == "done":
                continue
            deaf = (
                status == "idle"
                and level.options.on_idle_punctuation == "ignore"
                and name not in self.had_rows
            )
            if (name in active and not deaf) or one.pending:
                level.set_status(name, "active")
            elif status == "active" and self._timed_out(
                one.active_at, self._partition_timeout(member.source)
            ):
                level.set_status(name, "idle")
        heard = {Member.parse(name).source for name in active}
        self.deaf = {name for name in self.sources if self._only_punctuated(name)}
        self.quiet = {
            name for name in self.sources if self._source_status(name, name in heard - self.deaf)
        }

    def _only_punctuated(self, name: str) -> bool:
        """A source that is idle at the output, is not to be woken by punctuation, and has brought no rows and has none left."""
        given = self.output.inputs.get(name)
        if (
            given is None
            or given.status != "idle"
            or self.spec.coalesce.on_idle_punctuation == "revive"
        ):
            return False
        brought = {Member.parse(member).source for member in self.had_rows}
        return name not in brought and not any(
            one.pending for m, one in self.members.items() if m.source == name
        )

    def _source_status(self, name: str, heard: bool) -> bool:
        """A source as a member of the output.

        It joins, and it is quiet when it is silent for the output's timeout.
        """
        if name not in self.output.inputs:
            if self.spec.coalesce.members == "discovered" and not heard:
                return False
            self.output.join(name)
            self.active_at[name] = self.clock or 0
        if heard:
            self.active_at[name] = self.clock or 0
        pending = any(one.pending for m, one in self.members.items() if m.source == name)
        return (
            not pending
            and not heard
            and self._timed_out(self.active_at[name], self.spec.coalesce.idle_timeout)
        )

    def _shown_statuses(self) -> dict[str, str]:
        """Status of each member whose source counts; all members of a quiet source are idle."""
        shown = {}
        for member in self.members:
            status = self.sources[member.source].inputs[str(member)].status
            if member.source in self.output.inputs:
                shown[str(member)] = (
                    "idle" if status == "active" and member.source in self.quiet else status
                )
        return shown

    def _partition_timeout(self, source: str) -> int | None:
        """A source that is one partition falls idle by the output's timer, unless it sets another."""
        spec = self.spec.sources[source]
        timeout = spec.coalesce.idle_timeout
        return (
            None
            if spec.partition_by == "source" and timeout == CoalesceOptions().idle_timeout
            else timeout
        )

    def _timed_out(self, since: int, timeout: int | None) -> bool:
        return timeout is not None and (self.clock or 0) - since >= timeout

    def _barriers(
        self, arrivals: Sequence[tuple[str, Any]], aborts: Sequence[int], cancels: Sequence[int]
    ) -> None:
        ended = {str(m) for m, one in self.members.items() if one.done}
        roster = {
            name: "done" if name in ended else status
            for name, status in self._shown_statuses().items()
        }
        for number in aborts:
            self.barriers.abort(number, self.clock or 0, roster)
        for number in cancels:
            self.barriers.cancel(number, self.clock or 0, roster)
        for name, row in arrivals:
            self.barriers.arrive(name, row, self.clock or 0, roster)
        self._end_grace()
        if not self.in_grace:
            self.barriers.settle(
                self.clock or 0, roster, {str(m) for m, one in self.members.items() if one.pending}
            )
        for member, one in self.members.items():
            # Only what is before the member's oldest open barrier counts for its frontier.
            open_rows = [
                b.rows[str(member)].seq for b in self.barriers.open if str(member) in b.rows
            ]
            current = (one.newest, one.punctuation)
            one.seen, one.promised = one.before_barrier[min(open_rows)] if open_rows else current

    def _end_grace(self) -> None:
        if self.in_grace and self.run_began is not None:
            self.in_grace = not self._timed_out(self.run_began, self.spec.release.startup_grace)

    # judging

    @property
    def _exact(self) -> bool:
        """Lag 0 and inclusive everywhere: the order compares with what was released."""
        return all(s.lag == 0 and s.frontier == "inclusive" for s in self.spec.sources.values())

    def _decide_lateness(self, section: int, before: int) -> Decision:
        """What is late, by what was known before the epoch."""
        by_time = not (self._exact and self.spec.release.mode == "ordered")
        late = (
            ReleaseMark(section, max(before, self._least_time(section))) if by_time else self.left
        )
        return Decision(
            now=self.clock or 0,
            frontier_before=before,
            frontier_after=before,
            section=section,
            order_late=None if self.spec.release.mode == "pass_through" else late,
            order_late_by_time=by_time,
            release_before=self.mark,
            release_after=self.mark,
            flagged=tuple(self.barriers.came_late),
        )

    def _least_time(self, section: int) -> int:
        """The section's own frontier: ahead of F while a member waits at its barrier."""
        if self._exact and self.spec.release.mode == "ordered":
            return TICK_MIN if self.left is None else self.left[1]
        return self.reached[1] if self.reached[0] == section else TICK_MIN

    # frontiers

    def _frontiers(self, now: int, data: Sequence[Row]) -> None:
        """F_i, the sources' frontiers and F: first by what was read, then by who ended with it."""
        for member, one in self.members.items():
            self._member_frontier(member, one, now, data)
        self._coalesce()
        if not self.in_grace:
            self._expire()
        for member, one in self.members.items():
            if one.done:
                self.sources[member.source].set_status(str(member), "done")
        self._coalesce()

    def _coalesce(self) -> None:
        """Each source (those imported from first), then F."""
        for name in sorted(self.sources, key=self._import_depth):
            punctuation = self.spec.sources[name].punctuation
            if punctuation is not None and punctuation.import_from is not None:
                for given in self.sources[name].inputs.values():
                    if given.status == "active":
                        given.raise_to(self._exported(punctuation.import_from))
            self.sources[name].settle()
        for name in self.output.inputs:
            self._source_to_output(name)
        if not self.in_grace:
            self.output.settle()

    def _exported(self, name: str) -> int | None:
        """A source's frontier for others.

        That it ended promises nothing about them, unless it is to advance to the end.
        """
        level, punctuation = self.sources[name], self.spec.sources[name].punctuation
        ends = punctuation is not None and punctuation.advance_to_end
        return level.frontier if ends else level.last_time

    def _member_frontier(
        self, member: Member, one: ModelMember, now: int, data: Sequence[Row]
    ) -> None:
        level = self.sources[member.source]
        known = level.inputs[str(member)]
        if known.status == "done":
            return
        newest_read = max((row.time for row in data if row.member == member), default=None)
        if known.status == "active":
            # The wall clock says nothing about rows that are held behind a barrier.
            known.raise_to(one.frontier(now, newest_read, clocked=str(member) not in self.blocked))

    def _import_depth(self, name: str) -> int:
        depth, seen = 0, {name}
        while (
            punctuation := self.spec.sources[name].punctuation
        ) is not None and punctuation.import_from:
            name = punctuation.import_from
            if name in seen:
                break
            seen.add(name)
            depth += 1
        return depth

    def _source_to_output(self, name: str) -> None:
        level, given = self.sources[name], self.output.inputs[name]
        if level.status == "done" or given.status == "done":  # a source that ended stays so
            self.output.set_status(name, "done")
            return
        if name in self.deaf:
            return
        idle = level.status == "idle" or name in self.quiet
        if not idle:
            self.output.set_status(name, "active")
        given.raise_to(self._framed(name, level.frontier))
        if idle:
            self.output.set_status(name, "idle")

    def _framed(self, name: str, frontier: int | None) -> int | None:
        frame = self.spec.sources[name].frame
        if frontier is None or frame is None or frontier == TICK_MAX:
            return frontier
        return None if frame == 0 else frontier - frontier % frame

    def _expire(self) -> None:
        """Rows that stayed for the build window leave, and F moves up to the largest of them."""
        limit, section = self.spec.release.build_window, self.barriers.section
        blocked = self.barriers.list_blocked_members()
        waits = [
            self._floor(m)
            for m, one in self.members.items()
            if one.pending and str(m) not in blocked and self._counts(m)
        ]
        self.expired = TICK_MIN
        if self.spec.release.mode == "pass_through":
            return
        staying = [w for w in self.waiting if w.mark.section == section and w.mark >= self.mark]
        for read_at, epoch in {(w.read_at, w.epoch) for w in staying}:
            # Rows read together expire together: when the newest of them waits for no one who has
            # rows left.
            newest = max(w.mark.time for w in staying if w.epoch == epoch)
            if (
                limit is not None
                and (self.clock or 0) - read_at >= limit
                and all(newest < floor for floor in waits)
            ):
                self.expired = max(self.expired, newest + 1)
        if self.expired > TICK_MIN:
            held = [
                self._floor(m)
                for m, one in self.members.items()
                if one.pending and str(m) in blocked
            ]
            reach = min([self.expired - (0 if self._exact else 1), *held])
            if reach > TICK_MIN:  # otherwise any row is held, and there is still no F
                self.output.raise_to(reach)

    def _floor(self, member: Member) -> int:
        frontier = self.sources[member.source].inputs[str(member)].frontier
        return TICK_MIN if frontier is None else frontier

    def _counts(self, member: Member) -> bool:
        """Whether F waits for the member: it and its source are active and aligned."""
        levels = [
            self.sources[member.source].inputs[str(member)],
            self.output.inputs.get(member.source),
        ]
        return all(
            given is not None and given.status == "active" and given.aligned for given in levels
        )

    # leaving

    def _decide_release(self, decision: Decision, after: int) -> Decision:
        """What leaves, by what is known after the epoch."""
        if self.spec.release.mode != "pass_through" and not self.in_grace:
            section = self.barriers.section
            self.reached = max(self.reached, ReleaseMark(section, self._reach()))
            self.mark = max(self.mark, self.reached, ReleaseMark(section, self.expired))
        seen = {str(m): {"seen": one.newest} for m, one in self.members.items()}
        return replace(
            decision, frontier_after=after, release_after=self.mark, after={"members": seen}
        )

    def _follow_released(self, moves: RowMoves) -> None:
        """Remember the greatest mark that left in order, and forget the rows that left."""
        marks = [placed.mark for placed, flagged in moves.released if not flagged]
        self.left = max([*marks, *((self.left,) if self.left else ())], default=None)
        if self.spec.release.mode == "pass_through":
            self.waiting = []
        else:
            self.waiting = [w for w in self.waiting if w.mark >= self.mark]

    def _reach(self) -> int:
        """Everything of the current section below this leaves.

        F, or more, since members at their barrier do not hold it.
        """
        reach = TICK_MIN if self.output.frontier is None else self.output.frontier
        blocked = self.barriers.list_blocked_members()
        if self.spec.release.mode != "ordered" or not blocked:
            return reach
        instead: dict[str, int | None] = {}
        for name, level in self.sources.items():
            given: dict[str, int | None] = {n: TICK_MAX for n in level.inputs if n in blocked}
            if given:
                promised = (level.combine(given, catching_up=True), level.frontier)
                reach_of = max((f for f in promised if f is not None), default=None)
                instead[name] = self._framed(name, reach_of)
        beyond = self.output.combine(instead, catching_up=True)
        return reach if beyond is None else max(reach, beyond)


def _report_moves(moves: RowMoves, outcome: Outcome) -> None:
    outcome.released = [
        (placed.section, placed.row, flagged or placed.tardy) for placed, flagged in moves.released
    ]
    outcome.late = [(late.row, late.output, late.reason) for late in moves.late]
    outcome.dropped = moves.dropped
    outcome.built = moves.built
    outcome.windows = moves.results
    outcome.expired = Counter({name: len(fold.expired) for name, fold in moves.folds.items()})
    outcome.buffered = len(moves.state.buffer)
    for window in (w for fold in moves.folds.values() for w in fold.live.values()):
        window.changed = False
