"""Decides sealed epochs again with other options, to show what these would have changed.

The recorded surveys do not depend on lags and idle timeouts, so the cuts are the recorded ones:
what an epoch read, its clock, its requests. Three things may differ from a run with these options:
which rows an epoch would have read (members that wait at a barrier or are far ahead are not read),
when an epoch without rows would have been sealed, and which rows of a member are late, of which a
survey knows the least and the greatest time only. So late rows have a lower and an upper bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tidegate.checkpoints.row_counts import RowCounts
from tidegate.jobs.eventtime.decider import decide
from tidegate.jobs.eventtime.decision_types import Decision, MemberSurvey, ReleaseMark, Survey
from tidegate.jobs.spec.event_time_options import LatePolicy
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.window_specs import WindowKind, WindowSpec
from tidegate.json_types import JsonObject
from tidegate.time_units import TICK_MAX, TICK_MIN, parse_duration, saturate_ticks

from .errors import (
    WHATIF_BAD_OPTION,
    WHATIF_NO_SURVEY,
    WHATIF_RETIRED,
    WHATIF_UNKNOWN_SOURCE,
)
from .recorded_epochs import RecordedEpoch

_SHOWN_POINTS = 400  # of the course of the frontiers; a screen has no room for more


@dataclass(frozen=True)
class WhatIfOptions:
    """Options to try instead of those of the spec.

    Attributes:
        lags: source -> lag in ticks.
        idle: source, or "" for the output -> idle timeout in ticks; None: never.
    """

    lags: Mapping[str, int] = field(default_factory=dict)
    idle: Mapping[str, int | None] = field(default_factory=dict)

    @classmethod
    def parse(cls, spec: PipelineSpec, lags: Iterable[str], idle: Iterable[str]) -> WhatIfOptions:
        """Read ``SOURCE=DURATION``; an idle timeout without a source is that of the output.

        An idle timeout may be ``never``. Of several values for one source the last counts.

        Raises:
            ConfigurationError: the pipeline has no such source, a duration cannot be read, or an
                idle timeout is not positive.
        """
        return cls(
            {n: ticks or 0 for n, ticks in (_parse_option(spec, "--lag", one) for one in lags)},
            dict(_parse_option(spec, "--idle", one) for one in idle),
        )

    def apply(self, spec: PipelineSpec) -> PipelineSpec:
        """Return the spec with these options instead of its own."""
        sources = {name: self._apply_to_source(name, one) for name, one in spec.sources.items()}
        coalesce = spec.coalesce
        if "" in self.idle:
            coalesce = coalesce.model_copy(update={"idle_timeout": self.idle[""]})
        return spec.model_copy(update={"sources": sources, "coalesce": coalesce})

    def _apply_to_source(self, name: str, source: SourceSpec) -> SourceSpec:
        update: dict[str, Any] = {"lag": self.lags[name]} if name in self.lags else {}
        if name in self.idle:
            timeout = {"idle_timeout": self.idle[name]}
            update["coalesce"] = source.coalesce.model_copy(update=timeout)
        return source.model_copy(update=update)


def _parse_option(spec: PipelineSpec, option: str, text: str) -> tuple[str, int | None]:
    """Return the source, or "" for the output, and the ticks; None: never."""
    name, equals, duration = text.rpartition("=")
    bad: Exception = WHATIF_BAD_OPTION(pipeline=spec.name, option=option, text=text)
    if equals and name not in spec.sources:
        known = ", ".join(spec.sources)
        raise WHATIF_UNKNOWN_SOURCE(pipeline=spec.name, source=name, sources=known)
    if not equals and option == "--lag":
        raise bad
    if option == "--idle" and duration == "never":
        return name, None
    try:
        ticks = parse_duration(duration)
    except ValueError as error:
        raise bad from error
    if option == "--idle" and ticks <= 0:
        raise bad
    return name, ticks


@dataclass(slots=True)
class Course:
    """What the decisions of one run over the epochs came to.

    Attributes:
        delays: per epoch, ticks by which F is behind the newest time read; None without either.
        idle: source -> how often it or one of its members became idle.
        idle_ticks: source -> ticks of the wall clock with all its joined members idle.
        barriers: outcome -> barriers that closed.
        waits: ticks of the pipeline clock that each barrier waited.
        late: source -> (least, greatest) number of rows late for at least one output.
    """

    delays: list[int | None] = field(default_factory=list)
    idle: Counter[str] = field(default_factory=Counter)
    idle_ticks: Counter[str] = field(default_factory=Counter)
    barriers: Counter[str] = field(default_factory=Counter)
    waits: list[int] = field(default_factory=list)
    late: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, spec: PipelineSpec, survey: Survey, decision: Decision, step: int) -> None:
        """Add one epoch; `step` is the ticks of the wall clock since the one before."""
        seen = [m["seen"] for m in decision.after["members"].values() if m["seen"] is not None]
        frontier = decision.frontier_after
        known = bool(seen) and TICK_MIN < frontier < TICK_MAX
        self.delays.append(max(0, max(seen) - frontier) if known else None)
        for outcome in decision.recorded:
            if outcome["kind"] == "idle":
                self.idle[(outcome.get("source") or outcome["member"]).partition("/")[0]] += 1
        statuses: dict[str, set[str]] = {}
        for member, status in decision.statuses.items():
            statuses.setdefault(member.partition("/")[0], set()).add(status)
        self.idle_ticks.update({s: step for s, found in statuses.items() if found == {"idle"}})
        for barrier in decision.barriers:
            if not barrier.tardy:  # such a row is about a barrier that closed before
                self.barriers[barrier.outcome.value] += 1
                self.waits.append(barrier.wait_ticks)
        for one in survey.members:
            least, greatest = bound_late_rows(spec, one, decision)
            before = self.late.get(one.member.source, (0, 0))
            self.late[one.member.source] = (before[0] + least, before[1] + greatest)

    def to_record(self, read: Mapping[str, int]) -> JsonObject:
        """Return the JSON-ready form; durations are in ticks.

        Args:
            read: source -> rows read; the share of late rows is None without any.
        """
        delays = sorted(delay for delay in self.delays if delay is not None)
        return {
            "delay_p50_us": _select_quantile(delays, 0.5),
            "delay_p99_us": _select_quantile(delays, 0.99),
            "idle": dict(self.idle),
            "idle_us": dict(self.idle_ticks),
            "barriers": dict(self.barriers),
            "barrier_wait_p99_us": _select_quantile(sorted(self.waits), 0.99),
            "late": {
                source: {
                    "rows": list(bounds),
                    "share": [n / read[source] if read.get(source) else None for n in bounds],
                }
                for source, bounds in self.late.items()
            },
        }


def _select_quantile(ordered: list[int], share: float) -> int | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


@dataclass(slots=True)
class WhatIfReport:
    """What happened, and what the other options would have decided.

    Attributes:
        first: slot of the first epoch.
        last: slot of the last one.
        epochs: how many epochs were decided again.
        not_reproduced: slot -> fields of the decision that come out differently with the recorded
            options; a defect if there is any.
        happened: course of the sealed decisions.
        other: course with the other options.
        read: source -> rows read.
        late: source -> rows that were late for at least one output.
        points: (slot, wall clock, frontier as sealed, frontier with the other options).
    """

    first: int = 0
    last: int = 0
    epochs: int = 0
    not_reproduced: dict[int, tuple[str, ...]] = field(default_factory=dict)
    happened: Course = field(default_factory=Course)
    other: Course = field(default_factory=Course)
    read: Counter[str] = field(default_factory=Counter)
    late: Counter[str] = field(default_factory=Counter)
    points: list[tuple[int, int, int, int]] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        """Whether every decision came out as it was sealed when the recorded options were used."""
        return not self.not_reproduced

    def to_record(self) -> JsonObject:
        """Return the JSON-ready form, with at most 400 of the points, the newest among them.

        A frontier that is not known yet, or +inf, is None.
        """
        step = max(1, -(-len(self.points) // _SHOWN_POINTS))
        return {
            "first_slot": self.first,
            "last_slot": self.last,
            "epochs": self.epochs,
            "reproduced": self.is_exact,
            "not_reproduced": {str(slot): list(f) for slot, f in self.not_reproduced.items()},
            "rows_read": dict(self.read),
            "rows_late": dict(self.late),
            "happened": self.happened.to_record(self.read),
            "other": self.other.to_record(self.read),
            "points": [
                [slot, at, *(f if TICK_MIN < f < TICK_MAX else None for f in frontiers)]
                for slot, at, *frontiers in self.points[::-step][::-1]
            ],
        }


def run_what_if(
    pipeline: str, epochs: Iterable[RecordedEpoch], options: WhatIfOptions, first: int | None = None
) -> WhatIfReport:
    """Decide recorded epochs again, as they were and with other options.

    Args:
        pipeline: its name, for errors.
        epochs: epochs of one lineage, oldest first. Only those behind the last gap count: an epoch
            without a survey, or retired ones.
        options: the other options.
        first: the slot that someone asked for; None: no particular one.

    Raises:
        ConfigurationError: no epoch is left, or the slot asked for is before the first that is.
        PoisonError: with the other options a member does what its declaration forbids.
    """
    report, state = WhatIfReport(), None
    marks = _ReleasedMarks()
    specs: dict[str, PipelineSpec] = {}
    for epoch in epochs:
        survey = epoch.read_survey()
        if survey is None or not epoch.continues:  # an older version, or retired ones before it
            report, state, marks = WhatIfReport(), None, _ReleasedMarks()
        if survey is None:
            continue
        manifest = epoch.manifest
        if manifest.spec_digest not in specs:
            specs[manifest.spec_digest] = options.apply(epoch.spec)
        spec = specs[manifest.spec_digest]
        same, differences = epoch.decide_again(survey)
        if state is None:
            state, report.first = epoch.state_before, manifest.slot
        other = decide(spec, state, marks.replace_released(survey))
        marks.add(survey, other, same)
        before = epoch.parent.recorded_now if epoch.parent else manifest.recorded_now
        step = manifest.recorded_now - before
        report.happened.add(epoch.spec, survey, same, step)
        report.other.add(spec, survey, other, step)
        _add_epoch(report, epoch, differences, other)
        state = other.after
    _require_epochs(pipeline, report, first)
    return report


def _add_epoch(
    report: WhatIfReport, epoch: RecordedEpoch, differences: tuple[str, ...], other: Decision
) -> None:
    manifest = epoch.manifest
    report.last, report.epochs = manifest.slot, report.epochs + 1
    if differences:
        report.not_reproduced[manifest.slot] = differences
    for source, counts in manifest.epoch_counters.per_source.items():
        report.read[source] += counts.get("read", 0)
        report.late[source] += RowCounts.of_source(counts).late_rows
    report.points.append(
        (manifest.slot, manifest.recorded_now, manifest.frontier_after, other.frontier_after)
    )


def _require_epochs(pipeline: str, report: WhatIfReport, first: int | None) -> None:
    if not report.epochs:
        since = "" if first is None else f" from slot {first} on"
        raise WHATIF_NO_SURVEY(pipeline=pipeline, since=since)
    if first is not None and first < report.first:
        raise WHATIF_RETIRED(pipeline=pipeline, slot=first, oldest=report.first)


@dataclass(slots=True)
class _ReleasedMarks:
    """The greatest (section, time) that would have left, which exact order compares with.

    While both runs release up to the same mark it is the recorded one. Later it is the greatest
    mark of a member's newest row below what was released, which is never too great.
    """

    waiting: list[ReleaseMark] = field(default_factory=list)
    greatest: ReleaseMark | None = None
    differs: bool = False

    def replace_released(self, survey: Survey) -> Survey:
        if not self.differs:
            self.greatest = survey.released_max
            return survey
        return replace(survey, released_max=self.greatest)

    def add(self, survey: Survey, other: Decision, same: Decision) -> None:
        self.differs = self.differs or other.release_after != same.release_after
        self.waiting += [
            ReleaseMark(other.section, time)
            for member in survey.members
            if (time := member.max_kept_time) is not None
        ]
        left = [mark for mark in self.waiting if mark < other.release_after]
        self.waiting = [mark for mark in self.waiting if mark >= other.release_after]
        if self.differs and left:
            newest = max(left)
            self.greatest = newest if self.greatest is None else max(self.greatest, newest)


# How many rows of a member are late for at least one output, if only their least and greatest time
# are known. Each output's rows are late below some time, so the first row late for none decides.


def bound_late_rows(
    spec: PipelineSpec, member: MemberSurvey, decision: Decision
) -> tuple[int, int]:
    """Return the least and the greatest number of the member's rows that are late.

    Rows that `max_jump` set aside count as late.
    """
    aside = member.quarantined
    if not member.rows or member.min_time is None or member.max_time is None:
        return aside, aside
    source = spec.sources[member.member.source]
    punctuation = source.punctuation
    violating = 0 if punctuation and punctuation.on_violation == "adjust" else member.violations
    if _is_late(spec, source, member.max_time, decision, surely=True):
        least = member.rows
    else:
        least = int(_is_late(spec, source, member.min_time, decision, surely=True))
    if not _is_late(spec, source, member.min_time, decision, surely=False):
        greatest = member.violations
    elif _is_late(spec, source, member.max_time, decision, surely=False):
        greatest = member.rows
    else:
        # The newest row is late for nothing, unless it broke its own punctuation.
        greatest = member.rows if member.violations else member.rows - 1
    least = min(max(least, violating), member.rows)
    return aside + least, aside + max(least, greatest)


def _is_late(
    spec: PipelineSpec, source: SourceSpec, time: int, decision: Decision, *, surely: bool
) -> bool:
    """Whether a row with this time is late for an output: surely, or possibly."""
    events = time < decision.late_bound
    if surely:
        events = events and spec.release.on_late is not LatePolicy.ADJUST
    lasting = source.end_time is not None or source.edges is not None
    return events or any(
        _is_late_for_window(window, time, decision.frontier_before, lasting, surely=surely)
        for window in spec.windows.values()
    )


def _is_late_for_window(
    window: WindowSpec, time: int, frontier: int, lasting: bool, *, surely: bool
) -> bool:
    if time >= frontier:
        return False
    covered = window.min_window_start is None and (window.size or 0) >= (window.period or 0)
    unsure = window.kind is WindowKind.SESSION or lasting or not covered
    if unsure or window.on_late is LatePolicy.ADJUST:
        return not surely
    if window.late_unit == "event":
        return True
    if window.lateness is None:
        return False
    size, period = window.size or 0, window.period or 1
    start = (time - window.offset) // period * period + window.offset
    if window.late_unit == "first_window":
        start = ((time - window.offset - size) // period + 1) * period + window.offset
    return frontier == TICK_MAX or saturate_ticks(start + size + window.lateness) <= frontier
