"""What a changed spec would do to a pipeline, before anyone starts it: `tidegate plan`.

The rules are those of `spec_changes`, by which the driver judges when it starts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from .field_rules import ChangeEffect
from .job_spec import JobSpec
from .pipeline import EVENTS, LATE, PipelineSpec
from .spec_changes import LiveState, SpecChange, compare_jobs, compare_specs

_SECTIONS = ("sources", "windows", "streams", "pipes", "reducers", "sinks")


_VERDICT_WORDS = {
    "depends": "depends on the state",
    "restore": "needs a restore",
    "kept": "goes on",
}


class PlanVerdict(StrEnum):
    """What becomes of one part of a pipeline."""

    REFUSED = "refused"
    DEPENDS = "depends"
    RESTORE = "restore"
    DROPPED = "dropped"
    BEGINS = "begins"
    KEPT = "kept"

    @property
    def words(self) -> str:
        """What people read."""
        return _VERDICT_WORDS.get(self.value, self.value)


class PlanExit(IntEnum):
    """Exit codes of the command; 2 and 3 have their usual meaning."""

    UNCHANGED = 0
    CHANGES = 10
    REFUSED = 11
    DEPENDS = 12


@dataclass(frozen=True)
class PlanRow:
    """One change.

    Attributes:
        what: the dotted field, and how it changed if it was added, removed or replaced.
        verdict: what becomes of the state.
        why: the reason.
        way_out: what to do instead, for what is refused.
        tables: tables whose later rows the change can alter.
    """

    what: str
    verdict: PlanVerdict
    why: str
    way_out: str | None = None
    tables: tuple[str, ...] = ()


@dataclass(frozen=True)
class RestoreOffer:
    """A restore after which a spec fits that the newest checkpoint refuses.

    Attributes:
        checkpoint: its id, or `beginning`.
        rows_again: rows that are read a second time.
    """

    checkpoint: str
    rows_again: int


@dataclass(frozen=True)
class SpecPlan:
    """What a spec would do.

    Attributes:
        pipeline: its name.
        against: the checkpoint or the spec with which it was compared; None: nothing was sealed.
        rows: the changes, the worst first.
        goes_on: parts of the pipeline that stay as they are.
        restore: a way out of what is refused.
    """

    pipeline: str
    against: str | None
    rows: tuple[PlanRow, ...] = ()
    goes_on: tuple[str, ...] = ()
    restore: RestoreOffer | None = None

    @property
    def exit_code(self) -> PlanExit:
        """The exit code of the command."""
        verdicts = {row.verdict for row in self.rows}
        if verdicts & {PlanVerdict.REFUSED, PlanVerdict.RESTORE}:
            return PlanExit.REFUSED
        if PlanVerdict.DEPENDS in verdicts:
            return PlanExit.DEPENDS
        return PlanExit.CHANGES if self.rows else PlanExit.UNCHANGED

    @property
    def changed_tables(self) -> list[str]:
        """Tables whose later rows a change can alter, in the order of the changes."""
        return list(dict.fromkeys(table for row in self.rows for table in row.tables))


def plan_against_spec(old: PipelineSpec, new: PipelineSpec, against: str) -> SpecPlan:
    """Compare a spec with an earlier one, whose state is not known.

    A change whose effect depends on the state has the verdict DEPENDS.
    """
    busy = LiveState(
        windows=frozenset(old.windows), buffered=1, frontier=0, streams=frozenset(old.streams)
    )
    idle_changes = {change.what: change for change in compare_specs(old, new, LiveState())}
    rows = []
    for change in compare_specs(old, new, busy):
        idle = idle_changes[change.what]
        if idle.verdict is change.verdict:
            rows.append(make_plan_row(idle, old, new))
            continue
        why, way_out = _split_reason(change.why)
        tables = tuple(_list_changed_tables(change.what, old, new))
        rows.append(PlanRow(change.what, PlanVerdict.DEPENDS, f"refused if {why}", way_out, tables))
    rows += list_apart_changes(old, new)
    return make_plan(old, new, against, rows)


def plan_job_against_spec(old: JobSpec, new: JobSpec, against: str) -> SpecPlan:
    """Compare the spec of a job with an earlier one; Spark judges the state of its queries."""
    rows = [
        PlanRow(change.what, PlanVerdict(change.verdict.value), *_split_job_reason(change))
        for change in compare_jobs(old, new)
    ]
    rows += _list_apart_sections(old, new, ("description", "supervision", "quality"))
    return SpecPlan(new.name, against, tuple(rows))


def make_plan(
    old: PipelineSpec,
    new: PipelineSpec,
    against: str,
    rows: Sequence[PlanRow],
    restore: RestoreOffer | None = None,
) -> SpecPlan:
    """Return the plan of these changes, and what goes on beside them."""
    order = [*PlanVerdict]
    named = {".".join(row.what.split(" ")[0].split(".")[:2]) for row in rows}
    kept = [
        f"{section}.{name}"
        for section in _SECTIONS
        for name in getattr(new, section)
        if name in getattr(old, section) and f"{section}.{name}" not in named
    ]
    ranked = sorted(rows, key=lambda row: order.index(row.verdict))
    return SpecPlan(new.name, against, tuple(ranked), tuple(kept), restore)


def make_plan_row(
    change: SpecChange, old: PipelineSpec, new: PipelineSpec, *, is_restorable: bool = False
) -> PlanRow:
    """Return the row of a change.

    Args:
        change: the change, judged with the state.
        old: the spec before.
        new: the spec after.
        is_restorable: a restore makes the spec fit.
    """
    tables = tuple(_list_changed_tables(change.what, old, new))
    if change.verdict is ChangeEffect.REFUSED:
        verdict = PlanVerdict.RESTORE if is_restorable else PlanVerdict.REFUSED
        return PlanRow(change.what, verdict, *_split_reason(change.why), tables)
    verdict = PlanVerdict(change.verdict.value)
    # Columns are added to what goes on; sources, windows and streams begin.
    section, _, rest = change.what.partition(".")
    if section in _SECTIONS and rest.endswith(" added") and "." not in rest:
        verdict = PlanVerdict.BEGINS
    return PlanRow(change.what, verdict, change.why, None, tables)


def _split_reason(why: str) -> tuple[str, str]:
    """The reason of a refused change, and the way out that follows it."""
    reason, _, way_out = why.rpartition(": ")
    return (reason, way_out) if reason else (why, "take the change back")


def _split_job_reason(change: SpecChange) -> tuple[str, str | None]:
    refused = change.verdict is ChangeEffect.REFUSED
    return _split_reason(change.why) if refused else (change.why, None)


def _list_changed_tables(what: str, old: PipelineSpec, new: PipelineSpec) -> Iterator[str]:
    """The tables whose later rows a change can alter, and that are there after it."""
    section, name, *_ = f"{what.split(' ')[0]}.".split(".")
    if section in ("sources", "schema", "coalesce", "release", "barriers"):
        yield from (EVENTS, LATE, *new.windows, *new.streams)
    elif section in ("windows", "streams"):
        yield from (name,) if name in getattr(new, section) else ()
    elif section in ("pipes", "reducers"):
        one = getattr(new, section).get(name) or getattr(old, section).get(name)
        yield from () if one is None else (to for to in one.destinations if to in new.streams)


def list_apart_changes(old: PipelineSpec, new: PipelineSpec) -> Iterator[PlanRow]:
    """Yield the changes on which neither rows nor state depend, such as those of sinks."""
    for name in sorted(new.sinks.keys() - old.sinks.keys()):
        start = getattr(new.sinks[name], "start", "beginning")
        where = "the next epoch" if start == "head" else "the first epoch that is kept"
        yield PlanRow(f"sinks.{name} added", PlanVerdict.BEGINS, f"receives rows from {where} on")
    for name in sorted(old.sinks.keys() - new.sinks.keys()):
        yield PlanRow(f"sinks.{name} removed", PlanVerdict.DROPPED, "receives nothing more")
    for name in sorted(old.sinks.keys() & new.sinks.keys()):
        if old.sinks[name] != new.sinks[name]:
            why = "goes on behind the last epoch that it received"
            yield PlanRow(f"sinks.{name}", PlanVerdict.KEPT, why)
    apart = ("description", "supervision", "spark", "quality", "splice")
    yield from _list_apart_sections(old, new, apart)
    arranged = ("layout", "compact", "file_mb")
    if any(getattr(old.outputs, name) != getattr(new.outputs, name) for name in arranged):
        why = "new files are arranged by it; rows stay as they are"
        yield PlanRow("outputs", PlanVerdict.KEPT, why)


def _list_apart_sections(
    old: PipelineSpec | JobSpec, new: PipelineSpec | JobSpec, names: Sequence[str]
) -> Iterator[PlanRow]:
    for name in names:
        if getattr(old, name) != getattr(new, name):
            yield PlanRow(name, PlanVerdict.KEPT, "rows and state do not depend on it")
