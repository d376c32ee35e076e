"""Applies a survey to the members: who joined, ended or is idle, and the frontier of each.

Rule: semantics.md section 1. The cost of this part of an epoch grows with the number of members, so
it is one pass. The options of a source are prepared before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tidegate.jobs.spec.event_time_options import CoalesceOptions
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.time_units import TICK_MAX, TICK_MIN

from . import frontiers as frontiers
from .decider_state import DeciderState, HeldRows, MemberState
from .decision_types import Member, MemberSurvey, Survey
from .errors import PUNCTUATION_REGRESSED, ROWS_AFTER_END, UNKNOWN_SOURCE
from .frontiers import (
    ACTIVE,
    DONE,
    IDLE,
    Coalescer,
    InputState,
    compute_heuristic_frontier,
    max_frontier,
)
from .pipeline_clock import has_expired

_DEFAULT_IDLE_TIMEOUT = CoalesceOptions().idle_timeout


def resolve_partition_timeout(spec: PipelineSpec, source: SourceSpec) -> int | None:
    """Return the idle timeout of a source's partitions, in ticks; None: never idle.

    A source of one partition (``partition_by: source``) uses the timeout of the output, unless it
    sets one other than the default.
    """
    timeout = source.coalesce.idle_timeout
    return (
        spec.coalesce.idle_timeout
        if source.partition_by == "source" and timeout == _DEFAULT_IDLE_TIMEOUT
        else timeout
    )


@dataclass(slots=True)
class SourceRules:
    """What `Members` needs to know of one source, prepared once per epoch.

    Attributes:
        options: the source in the spec.
        coalescer: of the source; `Members` tells it the status and frontier of each member.
        distance: ticks of the frontier below the newest row (`compute_frontier_lag`); None without
            a lag.
        timeout: ticks after which a partition is idle (`resolve_partition_timeout`); None: never.
    """

    options: SourceSpec
    coalescer: Coalescer
    distance: int | None
    timeout: int | None

    @classmethod
    def from_spec(cls, spec: PipelineSpec, name: str, coalescer: Coalescer) -> SourceRules:
        """Return the rules of the source `name`."""
        source = spec.sources[name]
        distance = frontiers.compute_frontier_lag(source)
        return cls(source, coalescer, distance, resolve_partition_timeout(spec, source))

    def member_frontier(
        self, state: MemberState, now: int, newest: int | None, *, clocked: bool
    ) -> int | None:
        """Return the member's frontier: the greatest that rows, punctuation or wall clock promise.

        The wall clock counts only if `clocked`. None if none of them promises anything yet.

        Args:
            state: of the member.
            now: recorded wall clock, ticks.
            newest: largest event time of the member in this epoch; None without rows.
            clocked: the wall clock counts.
        """
        value = max_frontier(
            compute_heuristic_frontier(state["seen"], self.distance), state["punctuation"]
        )
        wall = self.options.wall_clock
        if wall is not None and clocked:
            inclusive = self.options.frontier == "inclusive"
            value = max_frontier(
                value, frontiers.compute_wall_clock_frontier(wall, now, newest, inclusive=inclusive)
            )
        return value


@dataclass(slots=True)
class Members:
    """The members during one pass over a survey, and what the pass found.

    Attributes:
        world: the decider's state, which the pass changes.
        rules: source -> its rules.
        now: recorded wall clock of the epoch, which never goes back.
        clock: pipeline clock.
        members_at_barrier: members at an open barrier before the epoch.
        joined: joined members' surveys, in survey order.
        pending: joined members that had rows left when the cut was planned.
        sources_with_backlog: sources of the pending members.
        sources_read: sources of which anything was read.
        sources_with_rows: sources of which rows or barriers were read, not only punctuation.
        newest: largest event time read; None without rows.
        newest_end: largest `MemberSurvey.newest_end`.
        punctuations: punctuation of each member before the epoch.
        fallen_idle: members that became idle by the clock.
        arrivals: members whose slice ends with a barrier row.
        ended: members that are read to their end by this cut; they count as active until
            `finish_ended`.
    """

    world: DeciderState
    rules: dict[str, SourceRules]
    now: int
    clock: int
    members_at_barrier: set[str]
    joined: dict[str, MemberSurvey] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)
    sources_with_backlog: set[str] = field(default_factory=set)
    sources_read: set[str] = field(default_factory=set)
    sources_with_rows: set[str] = field(default_factory=set)
    newest: int | None = None
    newest_end: int = TICK_MIN
    punctuations: dict[str, int] = field(default_factory=dict)
    fallen_idle: list[str] = field(default_factory=list)
    arrivals: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def apply_surveys(self, entries: Iterable[MemberSurvey]) -> None:
        """Apply all surveys: joins, rows, statuses, frontiers and ends.

        Then remove members that are gone.

        Raises:
            PoisonError: rows after an end, punctuation that regresses, or a source that the spec
                does not have.
        """
        for entry in entries:
            rules = self.rules.get(entry.member.source)
            if rules is None:
                raise UNKNOWN_SOURCE(member=entry.member)
            self._apply_member(str(entry.member), rules, entry)
        # Comparing the sizes is enough: every joined member has a state.
        if len(self.joined) != len(self.world.members):
            for name in self.world.members.keys() - self.joined.keys():
                self._remove_member(name)

    def count_held_rows(self, name: str) -> None:
        """Let the rows that were read behind a member's closed barrier move its frontier.

        Used with the alignment ``pass``; does nothing for a member without such rows.
        """
        state, entry = self.world.members.get(name), self.joined.get(name)
        if state is None or entry is None or state["behind"] is None:
            return
        behind = state["behind"]
        seen = max_frontier(state["seen"], behind["seen"])
        punctuation = max_frontier(state["punctuation"], behind["punctuation"])
        state = {**state, "seen": seen, "punctuation": punctuation, "behind": None}
        self.world.members[name] = state
        rules = self.rules[entry.member.source]
        known = rules.coalescer.inputs[name]
        if known["status"] == ACTIVE:
            self._advance_frontier(
                name, rules, known, rules.member_frontier(state, self.now, None, clocked=False)
            )

    def finish_ended(self) -> None:
        """Take the members that ended with this cut out of the frontiers.

        Their last rows have counted.
        """
        for name in self.ended:
            self.rules[self.joined[name].member.source].coalescer.signal_done(name)

    def _apply_member(self, name: str, rules: SourceRules, entry: MemberSurvey) -> None:
        state = self.world.members.get(name)
        rows = bool(entry.rows or entry.quarantined or entry.dead) or entry.barrier is not None
        active = rows or (
            entry.punctuation is not None and _is_new_punctuation(entry.punctuation, state)
        )
        if state is None:
            if rules.options.coalesce.members == "discovered" and not active:
                return
            # A discovered member joins with its first event, a declared one with its first survey.
            state = self.world.members[name] = _new_member_state(self.clock)
            rules.coalescer.join(name)
        self._note_activity(name, state, entry, active=active, rows=rows)
        known = rules.coalescer.inputs[name]
        status = known["status"]
        if status == DONE:
            # An end is a promise: rows behind it would be behind every frontier that counted on it.
            if active or entry.pending:
                raise ROWS_AFTER_END(member=name)
            return
        if entry.regressions and (own := rules.options.punctuation) and own.regress == "error":
            raise PUNCTUATION_REGRESSED(member=name, times=entry.regressions)
        if active or entry.pending != state["pending"] or entry.punctuation_state is not None:
            state = self.world.members[name] = self._next_member_state(
                name, state, entry, active=active
            )
        # Punctuation alone does not wake the member then.
        if rules.options.coalesce.on_idle_punctuation == "ignore" and status == IDLE:
            active = rows or entry.pending
        status = self._update_member_status(
            name, rules, status, state, wakes=active or entry.pending
        )
        if status == ACTIVE and (active or rules.options.wall_clock is not None):
            clocked = name not in self.members_at_barrier
            self._advance_frontier(
                name,
                rules,
                known,
                rules.member_frontier(state, self.now, entry.max_time, clocked=clocked),
            )
        if entry.done:
            self.ended.append(name)

    def _note_activity(
        self, name: str, state: MemberState, entry: MemberSurvey, *, active: bool, rows: bool
    ) -> None:
        self.joined[name] = entry
        if state["punctuation"] is not None:
            self.punctuations[name] = state["punctuation"]
        if active:
            self.sources_read.add(entry.member.source)
        if rows:
            self.sources_with_rows.add(entry.member.source)
        if entry.pending:
            self.pending.add(name)
            self.sources_with_backlog.add(entry.member.source)
        if entry.barrier is not None:
            self.arrivals.append(name)
        # A row that broke its punctuation is in no buffer, so its residence cannot run out.
        self.newest = max_frontier(self.newest, entry.max_kept_time)
        self.newest_end = max(self.newest_end, entry.newest_end)

    def _next_member_state(
        self, name: str, state: MemberState, entry: MemberSurvey, *, active: bool
    ) -> MemberState:
        """What the rows and punctuation of this cut say.

        Behind an open barrier they are only held.
        """
        seen, punctuation, behind = state["seen"], state["punctuation"], state["behind"]
        if name in self.members_at_barrier:
            held: HeldRows = behind or {"seen": None, "punctuation": None}
            behind = {
                "seen": max_frontier(held["seen"], entry.max_time),
                "punctuation": max_frontier(held["punctuation"], entry.punctuation),
            }
        else:
            seen = max_frontier(seen, entry.max_time)
            punctuation = max_frontier(punctuation, entry.punctuation)
        return {
            "seen": seen,
            "punctuation": punctuation,
            "behind": behind,
            "active_at": self.clock if active else state["active_at"],
            "pending": entry.pending,
            "generator": (
                state["generator"] if entry.punctuation_state is None else entry.punctuation_state
            ),
        }

    def _update_member_status(
        self, name: str, rules: SourceRules, status: str, state: MemberState, *, wakes: bool
    ) -> str:
        """Idle iff nothing is pending and the last activity is `idle_timeout` ago.

        Anything to read revives.
        """
        if wakes:
            if status == IDLE:
                rules.coalescer.signal_active(name)
            return ACTIVE
        if status == ACTIVE and has_expired(self.clock, state["active_at"], rules.timeout):
            rules.coalescer.signal_idle(name)
            self.fallen_idle.append(name)
            return IDLE
        return status

    @staticmethod
    def _advance_frontier(
        name: str, rules: SourceRules, known: InputState, value: int | None
    ) -> None:
        if value is not None and (known["frontier"] is None or value > known["frontier"]):
            rules.coalescer.signal_frontier(name, value)

    def _remove_member(self, name: str) -> None:
        del self.world.members[name]
        self.world.barriers.missed.pop(name, None)
        source = self.world.sources.get(Member.parse(name).source)
        if source is not None:
            source.remove(name)


def add_requested_punctuation(
    spec: PipelineSpec, world: DeciderState, survey: Survey
) -> Iterable[MemberSurvey]:
    """Return the members' surveys as if each slice ended with the CTIs sent to its source.

    Unchanged are members that have promised as much, have ended, or have not joined.
    """
    if not survey.ctis:
        return survey.members
    marks: dict[str, int] = {}
    for source, time in survey.ctis:
        mark = min(time, TICK_MAX - 1) + (spec.sources[source].frontier == "inclusive")
        marks[source] = max(mark, marks.get(source, TICK_MIN))
    return [
        _add_punctuation(entry, marks[entry.member.source], world)
        if entry.member.source in marks and _has_joined(entry, spec, world)
        else entry
        for entry in survey.members
    ]


def _has_joined(entry: MemberSurvey, spec: PipelineSpec, world: DeciderState) -> bool:
    """Return whether the member is known, or joins with what was read of it."""
    return (
        str(entry.member) in world.members
        or spec.sources[entry.member.source].coalesce.members == "declared"
        or bool(entry.rows or entry.quarantined or entry.dead)
        or (entry.barrier, entry.punctuation) != (None, None)
    )


def _add_punctuation(entry: MemberSurvey, mark: int, world: DeciderState) -> MemberSurvey:
    name = str(entry.member)
    state, known = world.members.get(name), world.sources[entry.member.source].inputs.get(name)
    carried = entry.punctuation_state or (state["generator"] if state else None) or {}
    ended = known is not None and known["status"] == DONE
    if ended or mark <= carried.get("current", TICK_MIN):
        return entry
    return replace(entry, punctuation=mark, punctuation_state={**carried, "current": mark})


def _is_new_punctuation(punctuation: int, state: MemberState | None) -> bool:
    """Surveys repeat the punctuation in force; only a greater one is activity."""
    if state is None:
        return True
    behind = state["behind"]
    known = max_frontier(state["punctuation"], behind["punctuation"] if behind else None)
    return known is None or punctuation > known


def _new_member_state(clock: int) -> MemberState:
    return {
        "seen": None,
        "punctuation": None,
        "behind": None,
        "active_at": clock,
        "pending": False,
        "generator": None,
    }


def collect_statuses(world: DeciderState, quiet: set[str]) -> dict[str, str]:
    """Return member -> status; an active member is idle if its source is in `quiet`.

    Members of sources that the output does not have yet are left out.
    """
    found: dict[str, str] = {}
    for source, coalescer in world.sources.items():
        if source in world.output.inputs:
            found |= {
                name: IDLE if source in quiet and one["status"] == ACTIVE else one["status"]
                for name, one in coalescer.inputs.items()
            }
    return found


# Who holds the output frontier back, since when, and why (semantics.md section 4.4, issue "who
# holds the frontier").


def find_frontier_holder(
    spec: PipelineSpec, world: DeciderState, standing: set[str], wall: int
) -> dict[str, Any] | None:
    """Return the member that holds the output frontier back: ``member``, ``since`` and ``why``.

    It is the slowest member of the slowest source among those that make F: one without a frontier,
    else the one with the least. `member` is the source's name if none of its members counts. None
    if no source counts. `since` is the recorded wall clock at which it became that member. `why` is
    "open barrier", "buffered rows", "no punctuation", "idle timer running" or "no data".
    """
    source = _find_slowest_input(world.output)
    if source is None:
        return None
    member = _find_slowest_input(world.sources[source]) or source
    before = world.holder
    since = before["since"] if before is not None and before["member"] == member else wall
    return {
        "member": member,
        "since": since,
        "why": _explain_hold(spec, world, source, member, standing),
    }


def _needs_punctuation(source: SourceSpec) -> bool:
    """Whether nothing but punctuation of its own moves the source's frontier."""
    own = source.punctuation is not None and source.punctuation.import_from is None
    return own and source.lag is None and source.wall_clock is None


def _find_slowest_input(coalescer: Coalescer) -> str | None:
    """Name of the included input without a frontier, else with the least one.

    Ties by name, so that a replay agrees.
    """
    included = {
        n: i["frontier"]
        for n, i in coalescer.inputs.items()
        if i["aligned"] and i["status"] == ACTIVE
    }
    return min(included, key=lambda n: (included[n] is not None, included[n] or 0, n), default=None)


def _explain_hold(
    spec: PipelineSpec, world: DeciderState, source: str, member: str, standing: set[str]
) -> str:
    state = world.members.get(member)
    options = spec.sources[source]
    if member in standing:
        return "open barrier"
    if state is not None and state["pending"]:
        return "buffered rows"
    if _needs_punctuation(options) and (state is None or state["punctuation"] is None):
        return "no punctuation"
    if (
        spec.coalesce.idle_timeout is not None
        or resolve_partition_timeout(spec, options) is not None
    ):
        return "idle timer running"
    return "no data"
