"""The pure decider: what one cut means (docs/semantics.md, sections 1 to 4).

`decide` takes the spec, the state after the previous epoch and the survey of this one, and says
what the mover needs. It does no I/O and takes the wall clock as data, so the same arguments always
give the same decision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tidegate.jobs.spec.event_time_options import ReleaseMode
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import JsonObject, JsonView
from tidegate.time_units import TICK_MAX, TICK_MIN

from . import frontiers as frontiers
from . import members
from .decider_state import DeciderState
from .decision_types import Decision, LateMark, Member, ReleaseMark, Survey
from .frontiers import ACTIVE, DONE, IDLE, Coalescer, InputState, Signal
from .members import (
    Members,
    SourceRules,
    collect_statuses,
    resolve_partition_timeout,
)
from .pipeline_clock import PipelineTime, advance_clock, has_expired


def create_initial_state(spec: PipelineSpec) -> JsonObject:
    """Return the state before the first epoch, JSON-ready."""
    return DeciderState.initial(spec).to_dict()


def list_blocked_members(state: JsonObject) -> set[Member]:
    """Return the members that the next epoch must not read, as `Barriers.blocked_members`."""
    return {Member.parse(name) for name in state["blocked"]}


def decide(spec: PipelineSpec, state: JsonObject, survey: Survey) -> Decision:
    """Decide one epoch. Pure: `state` is not changed, the next state is `Decision.after`.

    The steps are those of semantics.md section 1, "Inside an epoch". Rows are judged (by the mover)
    against `frontier_before`, so all that moves here applies from the next epoch on.

    Raises:
        PoisonError: a member sent what its declaration forbids (rows after its end, a barrier
            without an id, a punctuation that regresses under ``regress: error``), or the spec does
            not have its source.
    """
    world = DeciderState.from_dict(spec, state)
    epoch = _EpochDecider.begin(spec, world, survey)
    # Step 1. The pipeline clock, who is there, and who has fallen idle by it.
    epoch.update_roster()
    # Step 2. Barriers: requests, arrivals, then closes. The rows of this epoch still belong to the
    # section before.
    epoch.advance_barriers()
    # Step 3. Member frontiers, then the sources', then the output's.
    epoch.advance_frontiers()
    # Step 4. What leaves the order buffer.
    return epoch.build_decision()


class _StateBefore(NamedTuple):
    """The state before the epoch."""

    time: PipelineTime | None
    frontier: int
    section: int
    released: ReleaseMark
    reach: ReleaseMark
    status: str
    idle: set[str]

    @classmethod
    def copy_from(cls, world: DeciderState) -> _StateBefore:
        """Copy the values of a world that will change in place."""
        order, output = world.order, world.output
        idle = {name for name, one in output.inputs.items() if one["status"] == IDLE}
        return cls(
            world.time,
            output.value,
            world.barriers.section,
            order.released,
            order.reach,
            output.status,
            idle,
        )


@dataclass(slots=True)
class _EpochDecider:
    """One call of `decide`: the world while it changes, and what there is to say about it."""

    spec: PipelineSpec
    world: DeciderState
    survey: Survey
    time: PipelineTime
    members: Members
    before: _StateBefore
    recorded: list[JsonObject] = field(default_factory=list)
    emitted: list[Signal] = field(default_factory=list)
    grace: bool = False
    quiet_sources: set[str] = field(default_factory=set)

    @classmethod
    def begin(cls, spec: PipelineSpec, world: DeciderState, survey: Survey) -> _EpochDecider:
        """The epoch before its first step."""
        time = advance_clock(world.time, survey.now, spec.checkpoint.max_clock_step, survey.worked)
        rules = {
            name: SourceRules.from_spec(spec, name, coalescer)
            for name, coalescer in world.sources.items()
        }
        members = Members(world, rules, time.wall, time.clock, world.barriers.members_at_barrier())
        return cls(spec, world, survey, time, members, _StateBefore.copy_from(world))

    @property
    def clock(self) -> int:
        """The pipeline clock of this epoch."""
        return self.time.clock

    # ------------------------------------------------------------------ step 1

    def update_roster(self) -> None:
        """Joins, removals, ends, activity and idleness of members, then of sources."""
        order = self.world.order
        if self.survey.run_start:
            order.start_run()
        self.members.apply_surveys(
            members.add_requested_punctuation(self.spec, self.world, self.survey)
        )
        for source, at in self.survey.ctis:
            self.recorded.append({"kind": "cti", "source": source, "time": at})
        self.recorded += [{"kind": "idle", "member": name} for name in self.members.fallen_idle]
        for name in self.world.sources:
            self._update_source_activity(name)
        was_over = order.grace_over
        self.grace = order.in_grace(self.clock, events=bool(self.members.sources_read))
        if order.grace_over and not was_over:
            self.recorded.append({"kind": "startup_grace_over"})

    def _update_source_activity(self, name: str) -> None:
        """A source as a member of the output.

        Known from the start or with its first event; quiet by the output's timeout.
        """
        output = self.world.output
        heard = name in self.members.sources_read and not self._ignores_punctuation(name)
        if name not in output.inputs:
            if self.spec.coalesce.members == "discovered" and not heard:
                return
            output.join(name)
            self.world.active_at[name] = self.clock
        if heard:
            self.world.active_at[name] = self.clock
        elif name not in self.members.sources_with_backlog and has_expired(
            self.clock, self.world.active_at[name], self.spec.coalesce.idle_timeout
        ):
            self.quiet_sources.add(name)

    def _ignores_punctuation(self, name: str) -> bool:
        """Whether a source was idle and sent only what `on_idle_punctuation` ignores."""
        return (
            name in self.before.idle
            and self.spec.coalesce.on_idle_punctuation == "ignore"
            and name not in self.members.sources_with_rows
            and name not in self.members.sources_with_backlog
        )

    # ------------------------------------------------------------------ step 2

    def advance_barriers(self) -> None:
        """Aborts by hand, arrivals in source order, then what closes.

        Nothing closes during the start-up grace.
        """
        barriers, live = self.world.barriers, self.members.joined
        asked = self.survey.aborts or self.survey.cancels
        if not (barriers.open or self.members.arrivals or asked):
            return
        known = collect_statuses(self.world, self.quiet_sources)
        barriers.roster = {
            name: DONE if entry.done else known[name]
            for name, entry in live.items()
            if name in known
        }
        for id_ in self.survey.aborts:
            barriers.abort(id_, self.clock)
        for id_ in self.survey.cancels:
            barriers.cancel_up_to(id_, self.clock)
            self.recorded.append({"kind": "cancel_barriers", "id": id_})
        for name in self.members.arrivals:
            row = live[name].barrier
            if row is not None:
                barriers.record_arrival(name, row, self.clock)
        if not self.grace:
            barriers.close_ready(self.clock, self.members.pending)
        for name in sorted(barriers.freed_members() & self.members.members_at_barrier):
            self.members.count_held_rows(name)

    # ------------------------------------------------------------------ step 3

    def advance_frontiers(self) -> None:
        """F moves by what was read, then by who ended with it.

        It does not move during the start-up grace.
        """
        newest = self.members.newest
        if newest is not None and self.spec.release.mode is not ReleaseMode.PASS_THROUGH:
            self.world.order.note_read(self.clock, self.before.section, self._adjust_newest(newest))
        self._coalesce_levels(expiring=True)
        if self.members.ended:
            self.members.finish_ended()
            self._coalesce_levels(expiring=False)

    def _adjust_newest(self, newest: int) -> int:
        """The newest time read; if all rows read are late and one is moved, the one it moves to."""
        mark = self._order_late_mark()[0]
        bound = TICK_MIN if mark is None else mark.bound_section(self.before.section)
        start = max(self.before.frontier, bound)
        adjusts = self.spec.release.limits_adjusted_rows and self.members.newest_end > start
        return start if adjusts and newest < bound else newest

    def _coalesce_levels(self, *, expiring: bool) -> None:
        """Every source in import order, then the output."""
        # An importing source needs the frontier that the imported one has in this epoch.
        for name in _sort_by_import(self.spec):
            self._coalesce_partitions(name)
        for name, coalescer in self.world.sources.items():
            known = self.world.output.inputs.get(name)
            if known is not None and known["status"] != DONE:
                self._signal_output(name, coalescer)
        if not self.grace:
            signals = self.world.output.settle(self._expire_residence() if expiring else TICK_MIN)
            last = dict(self.emitted) | dict(signals)
            self.emitted = [
                (k, last[k])
                for k in ("watermark", "status")
                if k in last and last[k] != self.before.status
            ]

    def _coalesce_partitions(self, name: str) -> None:
        """Import, then coalesce the partitions of one source."""
        coalescer = self.world.sources[name]
        punctuation = self.spec.sources[name].punctuation
        if punctuation is not None and punctuation.import_from is not None:
            imported = self._exported_frontier(punctuation.import_from)
            # Otherwise the source imported from has no frontier yet.
            if imported > TICK_MIN:
                for member, known in list(coalescer.inputs.items()):
                    if known["status"] == ACTIVE and (
                        known["frontier"] is None or imported > known["frontier"]
                    ):
                        coalescer.signal_frontier(member, imported)
        before = coalescer.value
        coalescer.settle()
        if TICK_MIN < before < TICK_MAX <= coalescer.value:
            options = [source.punctuation for source in self.spec.sources.values()]
            if any(one and one.import_from == name for one in options):
                self.world.last_exports[name] = before

    def _exported_frontier(self, name: str) -> int:
        """A source's frontier for others; the +inf of its mere end promises nothing about them."""
        value, punctuation = self.world.sources[name].value, self.spec.sources[name].punctuation
        ends = punctuation is not None and punctuation.advance_to_end
        # An ended source would otherwise end every source that imports from it.
        return value if value < TICK_MAX or ends else self.world.last_exports.get(name, TICK_MIN)

    def _signal_output(self, name: str, coalescer: Coalescer) -> None:
        output, source = self.world.output, self.spec.sources[name]
        known = output.inputs[name]
        emitted = frontiers.round_to_frame(
            coalescer.value if coalescer.value > TICK_MIN else None, source.frame
        )
        if coalescer.status == DONE:
            output.signal_done(name)
            return
        if self._ignores_punctuation(name):
            return
        idle = coalescer.status == IDLE or name in self.quiet_sources
        # Active before its frontier: on an idle member the frontier alone could be ignored.
        if not idle:
            output.signal_active(name)
        if emitted is not None and emitted > TICK_MIN:
            if idle:
                output.raise_frontier(name, emitted)
            elif known["frontier"] is None or emitted > known["frontier"]:
                output.signal_frontier(name, emitted)
        if idle and known["status"] != IDLE:
            output.signal_idle(name)
            self.recorded.append({"kind": "idle", "source": name})

    def _expire_residence(self) -> int:
        """F by the build window.

        The largest time whose residence has run out (section 2, `build_window`).
        """
        order, section = self.world.order, self.world.barriers.section
        overdue = order.latest_expired_time(self.clock, section, self._least_awaited_frontier())
        if overdue is None:
            return TICK_MIN
        self.recorded.append({"kind": "residence_expired", "section": section, "time": overdue})
        self.world.order.expire_up_to(ReleaseMark(section, overdue))
        return min(overdue + uses_exact_order(self.spec), self._least_frontier_at_barriers())

    def _least_awaited_frontier(self) -> int | None:
        """Least frontier of the members F waits for that had rows left.

        No timer may expire that waits for those.
        """
        output = self.world.output.inputs
        # Only members that F waits for: a member that is left out does not hold rows back.
        values = []
        for name in self.members.pending - self.world.barriers.members_at_barrier():
            levels = self._member_input(name), output.get(self.members.joined[name].member.source)
            if all(
                known is not None and known["status"] == ACTIVE and known["aligned"]
                for known in levels
            ):
                frontier = levels[0]["frontier"]
                values.append(TICK_MIN if frontier is None else frontier)
        return min(values, default=None)

    def _least_frontier_at_barriers(self) -> int:
        """F never passes a row held behind a barrier.

        The least frontier of members at a barrier that had rows left.
        """
        # Members without rows left hold nothing behind their barrier.
        standing = self.world.barriers.members_at_barrier() & self.members.pending
        values = [
            TICK_MIN if (f := self._member_input(name)["frontier"]) is None else f
            for name in standing
        ]
        return min(values, default=TICK_MAX)

    def _member_input(self, name: str) -> InputState:
        return self.world.sources[self.members.joined[name].member.source].inputs[name]

    # ------------------------------------------------------------------ step 4

    def build_decision(self) -> Decision:
        """Marks of the ordered release, and everything else a mover or a person wants to know."""
        world, before = self.world, self.before
        release_before = before.released
        release_after = self._advance_release()
        flagged = tuple(sorted(world.barriers.tardy_members()))
        closed = world.barriers.take_closed()
        for one in closed:
            outcome = one.health.outcome.value
            self.recorded.append(
                {"kind": "barrier", "id": one.health.id, "outcome": outcome, "cause": one.cause}
            )
        world.time = self.time
        # Kept for back-pressure, which is decided before the next survey.
        world.buffered_rows = self.survey.buffered_rows
        world.holder = members.find_frontier_holder(
            self.spec, world, world.barriers.members_at_barrier(), self.time.wall
        )
        late, by_time = self._order_late_mark()
        # Last: everything above belongs to the state that the next epoch begins with.
        after = world.to_dict()
        return Decision(
            now=self.clock,
            frontier_before=before.frontier,
            frontier_after=world.output.value,
            section=before.section,
            order_late=late,
            order_late_by_time=by_time,
            release_before=release_before,
            release_after=release_after,
            member_punctuation=self.members.punctuations,
            barriers=tuple(c.health for c in closed),
            blocked=tuple(after["blocked"]),
            flagged=flagged,
            statuses=collect_statuses(world, self.quiet_sources),
            emitted=tuple(self.emitted),
            recorded=tuple(self.recorded),
            holder=world.holder,
            changed=self._has_changed(release_before, release_after, after),
            after=after,
        )

    def _advance_release(self) -> ReleaseMark:
        """Section 3: up to the section's frontier.

        A member at its barrier does not hold back the section's rows.
        """
        mode, order = self.spec.release.mode, self.world.order
        if self.grace or mode is ReleaseMode.PASS_THROUGH:
            return order.released
        section = self.world.barriers.section
        reach = self.world.output.value
        standing = self.world.barriers.members_at_barrier()
        # The rows before a barrier may leave although their members wait at it.
        if mode is ReleaseMode.ORDERED and standing:
            reach = max(reach, self._section_frontier(standing))
        return order.release(ReleaseMark(section, reach))

    def _section_frontier(self, standing: set[str]) -> int:
        """The frontier of the section's rows.

        Members at a barrier count as +inf; members that still catch up are included.
        """
        instead: dict[str, int | None] = {}
        for name, coalescer in self.world.sources.items():
            unbounded: dict[str, int | None] = dict.fromkeys(
                standing & coalescer.inputs.keys(), TICK_MAX
            )
            if unbounded:
                # The frame rounds all that the source emits, also what it promised before.
                instead[name] = frontiers.round_to_frame(
                    frontiers.max_frontier(
                        coalescer.combine_frontiers(unbounded, catching_up=True),
                        coalescer.value if coalescer.value > TICK_MIN else None,
                    ),
                    self.spec.sources[name].frame,
                )
        reach = self.world.output.combine_frontiers(instead, catching_up=True)
        return TICK_MIN if reach is None else reach

    def _order_late_mark(self) -> tuple[ReleaseMark | None, bool]:
        """Section 3.3: below the largest released, or below F.

        While a member waits at its barrier the section's frontier may be ahead of F. A row below
        it breaks its own member's promise and is late as well, or the output would not stay sorted.
        """
        return _choose_late_mark(self.spec, self.before, self.survey.released_max)

    def _has_changed(
        self, release_before: ReleaseMark, release_after: ReleaseMark, after: JsonObject
    ) -> bool:
        """Worth sealing without rows: something moved, or a running timer has come a good way."""
        before = self.before
        if self.emitted or self.recorded or release_before != release_after:
            return True
        stepped = (
            before.time is None
            or self.clock - before.time.clock >= self.spec.checkpoint.max_clock_step
        )
        return stepped and find_next_timer(self.spec, after) is not None


def uses_exact_order(spec: PipelineSpec) -> bool:
    """Lag 0 and an inclusive frontier everywhere.

    The order compares with what was released (section 3.3).
    """
    return all(s.lag == 0 and s.frontier == "inclusive" for s in spec.sources.values())


def find_late_mark(
    spec: PipelineSpec, state: JsonView, released_max: ReleaseMark | None
) -> LateMark:
    """What `Decision.late_mark` of the next epoch will be: it is known before the epoch.

    `released_max` is as in `Survey`.
    """
    world = DeciderState.from_dict(spec, state)
    before = _StateBefore.copy_from(world)
    mark, by_time = _choose_late_mark(spec, before, released_max)
    return LateMark(before.frontier, before.section, mark, by_time)


def _choose_late_mark(
    spec: PipelineSpec, before: _StateBefore, released_max: ReleaseMark | None
) -> tuple[ReleaseMark | None, bool]:
    mode = spec.release.mode
    if mode is ReleaseMode.PASS_THROUGH:
        return None, False
    if mode is ReleaseMode.ORDERED and uses_exact_order(spec):
        return released_max, False
    reached = before.reach.time if before.reach.section == before.section else TICK_MIN
    time = max(before.frontier, reached)
    return ReleaseMark(before.section, time) if time > TICK_MIN else None, True


def _sort_by_import(spec: PipelineSpec) -> list[str]:
    """Sources, each after the one it imports its frontier from.

    A circle is cut where it is met again.
    """
    order: list[str] = []

    def visit_source(name: str, path: tuple[str, ...]) -> None:
        punctuation = spec.sources[name].punctuation
        if (
            punctuation is not None
            and punctuation.import_from is not None
            and punctuation.import_from not in path
        ):
            visit_source(punctuation.import_from, (*path, name))
        if name not in order:
            order.append(name)

    for name in spec.sources:
        visit_source(name, ())
    return order


def select_members_ahead(
    spec: PipelineSpec, state: JsonObject, buffered_rows: int | None = None
) -> set[Member]:
    """Return the members that back-pressure excludes from the next epoch.

    Rule: docs/semantics.md, section 7.4.

    The slowest members that do not wait at a barrier are always read, so this never stops a
    pipeline that has rows to read.

    Args:
        spec: the pipeline.
        state: the decider's state.
        buffered_rows: rows in the order buffer now; None: as of the last survey.
    """
    release = spec.release
    full = (
        state["buffered_rows"] if buffered_rows is None else buffered_rows
    ) >= release.max_buffered_rows
    # The usual case, decided without looking at ten thousand members.
    if not full and release.max_ahead is None:
        return set()
    reach = max(state["output"]["value"], state["order"]["released"][1])
    active, blocked = dict(_iter_active_frontiers(state)), set(state["blocked"])
    ahead = {n: value - reach for n, value in active.items() if value is not None and value > reach}
    # Who waits at a barrier waits for members that may be ahead: if they were not read either,
    # no one would be.
    held = set(ahead) if full and active.keys() - ahead.keys() - blocked else set()
    if release.max_ahead is not None:
        far = {name for name, distance in ahead.items() if distance > release.max_ahead}
        if any(m["pending"] and n not in far | blocked for n, m in state["members"].items()):
            held |= far
    return {Member.parse(name) for name in held}


def _iter_active_frontiers(state: JsonObject) -> Iterator[tuple[str, int | None]]:
    for source in state["sources"].values():
        for name, known in source["inputs"].items():
            if known["status"] == ACTIVE:
                yield name, known["frontier"]


def find_next_timer(spec: PipelineSpec, state: JsonObject) -> int | None:
    """Return when the next timer that may change something runs out, on the pipeline clock.

    None if no timer is running.
    """
    world = DeciderState.from_dict(spec, state)
    timers = [
        world.order.next_timer(),
        world.barriers.timeout_at(),
        *_iter_idle_timers(spec, world),
    ]
    return min((t for t in timers if t is not None), default=None)


def _iter_idle_timers(spec: PipelineSpec, world: DeciderState) -> Iterator[int]:
    for name, coalescer in world.sources.items():
        timeout = resolve_partition_timeout(spec, spec.sources[name])
        pending = False
        for member, known in coalescer.inputs.items():
            state = world.members[member]
            pending = pending or state["pending"]
            if timeout is not None and known["status"] == ACTIVE and not state["pending"]:
                yield state["active_at"] + timeout
        waiting = name in world.output.inputs and world.output.inputs[name]["status"] == ACTIVE
        if waiting and not pending and spec.coalesce.idle_timeout is not None:
            yield world.active_at[name] + spec.coalesce.idle_timeout
