"""Decides what a changed spec does to the state of a checkpoint.

It is kept, dropped, or the change is refused.

State is laid out by the spec that wrote it: partial aggregates by their window, buffered
rows by their columns, positions by the order of a source's objects. A change that would read one as
the other is refused; if only open windows or buffered rows matter, only while there are any. What
belongs to a removed source or window is dropped. Everything else is kept and applies from the next
epoch on; frontiers never move back. The rule of each field is in `field_rules`; here are the rules
over several fields. docs/recovery.md has the table.

What was removed leaves state behind as well: tables with their columns and results, positions of
sources, states of reducers. So what is added again is compared with all specs before.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tidegate.json_types import JsonView
from tidegate.time_units import TICK_MAX, TICK_MIN

from .column_types import collect_recorded_types, derive_table_types
from .field_rules import ChangeEffect, FieldRule, RuleCondition, find_field_rule
from .job_spec import JobSpec
from .pipeline import EVENTS, PipelineSpec
from .window_specs import Aggregate, WindowSpec

_REOPENED = find_field_rule(PipelineSpec, "windows.*.lateness").why
_RESTART_ADVICE = "start again under another name, or let the driver finish with the old spec first"
# Sections whose entries have state of their own, and what a person calls an entry.
_ENTRIES = {"sources": "source", "streams": "stream", "pipes": "pipe", "reducers": "reducer"}
# These are compared by `_compare_columns` and `_compare_aggregates`.
_COMPARED_APART = {"sources": {"columns"}, "windows": {"aggregates"}, "streams": {"columns"}}


@dataclass(frozen=True)
class SpecChange:
    """One difference between two specs, and its effect.

    Attributes:
        what: the dotted field, and how it changed if it was added, removed or replaced.
        verdict: the effect.
        why: what follows from it; for a refused change also what to do instead.
    """

    what: str
    verdict: ChangeEffect
    why: str


@dataclass(frozen=True)
class LiveState:
    """The state that a checkpoint holds.

    Attributes:
        windows: names of the windows with open results.
        buffered: rows in the order buffer.
        frontier: the output frontier, in ticks; TICK_MIN: none yet.
        streams: names of the streams in whose buffer rows wait.
    """

    windows: frozenset[str] = frozenset()
    buffered: int = 0
    frontier: int = TICK_MIN
    streams: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SpecHistory:
    """What earlier specs of the pipeline have left behind.

    Attributes:
        specs: those that have written tables, on any timeline. They may include the two that are
            compared.
        lineage: those of them that may have sealed the checkpoint or epochs before it, so that
            its state may be theirs.
    """

    specs: Sequence[PipelineSpec] = ()
    lineage: Sequence[PipelineSpec] = ()


def compare_specs(
    old: PipelineSpec, new: PipelineSpec, live: LiveState, history: SpecHistory | None = None
) -> list[SpecChange]:
    """Return every difference that rows or state can depend on.

    Refused ones first, then dropped, then kept. The names of the pipelines are not compared.
    """
    return _sort_changes(_SpecComparison(old, new, live, history or SpecHistory()).compare())


def list_added_names(old: PipelineSpec, new: PipelineSpec) -> set[tuple[str, str]]:
    """Return section and name of what is new and may have left state behind before."""
    return {
        (section, name)
        for section in ("windows", *_ENTRIES)
        for name in getattr(new, section).keys() - getattr(old, section).keys()
    }


def compare_table_types(new: PipelineSpec, history: SpecHistory) -> list[SpecChange]:
    """Return the refused changes of a spec that begins without state over tables that exist."""
    return [*_SpecComparison(new, new, LiveState(), history).compare_types()]


def compare_jobs(old: JobSpec, new: JobSpec) -> list[SpecChange]:
    """Return every difference between two specs of a job, by the rules of its fields."""
    left, right = (spec.model_dump(mode="json", by_alias=True) for spec in (old, new))
    found = []
    for path in _list_differing_paths(left, right):
        rule = find_field_rule(JobSpec, path)
        if rule.is_compared:
            found.append(SpecChange(path, rule.effect, rule.why))
    return _sort_changes(found)


def _sort_changes(found: Iterable[SpecChange]) -> list[SpecChange]:
    # What stops a restart comes first; the list may be long.
    order = [*reversed(ChangeEffect)]
    return sorted(found, key=lambda change: order.index(change.verdict))


def _make_kept_change(what: str, why: str = "applies from the next epoch on") -> SpecChange:
    return SpecChange(what, ChangeEffect.KEPT, why)


def _make_refused_change(what: str, why: str) -> SpecChange:
    return SpecChange(what, ChangeEffect.REFUSED, why)


class _SpecComparison:
    """Compares one spec with the one before it and with all that were before."""

    def __init__(
        self, old: PipelineSpec, new: PipelineSpec, live: LiveState, history: SpecHistory
    ) -> None:
        self._old, self._new, self._live, self._history = old, new, live, history
        self._recorded = collect_recorded_types([*history.specs, old])
        self._types = derive_table_types(new)

    def compare(self) -> Iterator[SpecChange]:
        """Every difference, section by section."""
        yield from self._compare_sources()
        yield from self._compare_columns()
        yield from self._compare_windows()
        yield from self._compare_streams()
        yield from self._compare_rest()
        yield from _compare_orders(self._old, self._new)

    def compare_types(self) -> Iterator[SpecChange]:
        """Every column whose table has had it with another type."""
        for table, columns in self._types.items():
            for column in columns:
                why = self._find_type_conflict(table, column)
                if why is not None:
                    yield _make_refused_change(f"{self._locate_column(table)}.{column}", why)

    def _locate_column(self, table: str) -> str:
        if table == EVENTS:
            return "schema"
        section = "windows" if table in self._new.windows else "streams"
        return f"{section}.{table}"

    def _find_type_conflict(self, table: str, column: str) -> str | None:
        """Why a column cannot have its type; None if every spec gave it this type."""
        kind = self._types[table][column]
        others = sorted(self._recorded.get((table, column), set()) - {kind})
        if not others:
            return None
        return (
            f"a table's column has one type, and {table}.{column} has been {', '.join(others)}:"
            f" give the column a new name, or {_RESTART_ADVICE}"
        )

    def _compare_sources(self) -> Iterator[SpecChange]:
        old, new = self._old, self._new
        for name in new.sources.keys() - old.sources.keys():
            how = (
                "at the frontier: its older rows are late"
                if new.coalesce.joins == "at_F"
                else "and holds the frontier until it has one"
            )
            yield self._judge_added_entry(
                "sources", name, f"is read from its beginning; it joins {how}"
            )
        for name in old.sources.keys() - new.sources.keys():
            waiting = self._live.buffered
            rows = f"; up to {waiting:,} buffered rows still leave in order" if waiting else ""
            # An end edge of a removed source is never read, so its open edges would count without
            # end.
            rows += "; its open edges count no more" if old.sources[name].edges else ""
            yield SpecChange(
                f"sources.{name} removed",
                ChangeEffect.DROPPED,
                f"its frontier does not count any more{rows}",
            )
        for name in sorted(old.sources.keys() & new.sources.keys()):
            yield from self._compare_entry("sources", name)

    def _compare_streams(self) -> Iterator[SpecChange]:
        """Streams, pipes and reducers."""
        for section in ("streams", "pipes", "reducers"):
            before, after = getattr(self._old, section), getattr(self._new, section)
            for name in sorted(after.keys() - before.keys()):
                yield self._judge_added_entry(section, name, "applies from the next epoch on")
            for name in sorted(before.keys() - after.keys()):
                left = "its table stays" if section == "streams" else "its state stays unused"
                yield SpecChange(f"{section}.{name} removed", ChangeEffect.DROPPED, left)
            for name in sorted(before.keys() & after.keys()):
                yield from self._compare_entry(section, name)
        for name in sorted(self._old.streams.keys() & self._new.streams.keys()):
            yield from self._compare_stream_columns(name)
        for name in sorted(self._new.streams.keys() - self._old.streams.keys()):
            for column in self._types[name]:
                why = self._find_type_conflict(name, column)
                if why is not None:
                    yield _make_refused_change(f"streams.{name}.schema.{column} added", why)

    def _compare_stream_columns(self, stream: str) -> Iterator[SpecChange]:
        before = dict(self._old.stream_graph.columns[stream])
        after = self._types[stream]
        for column in sorted(before.keys() | after.keys()):
            left, right = before.get(column), after.get(column)
            if left == right:
                continue
            change = _name_change(left, right, f"is {right} instead of {left}")
            what = f"streams.{stream}.schema.{column} {change}"
            why = self._find_type_conflict(stream, column) if right is not None else None
            yield (
                _make_kept_change(what, "the table keeps the column; rows without it read as null")
                if why is None
                else _make_refused_change(what, why)
            )

    def _judge_added_entry(self, section: str, name: str, why: str) -> SpecChange:
        """What an entry meets that an earlier one of its name has left: positions, states."""
        what, kind = f"{section}.{name} added", _ENTRIES[section]
        for spec in self._history.lineage:
            if name not in getattr(spec, section):
                continue
            earlier = _SpecComparison(spec, self._new, self._live, SpecHistory())
            for change in earlier._compare_entry(section, name):
                if change.verdict is ChangeEffect.REFUSED:
                    return _make_refused_change(
                        what,
                        f"an earlier {kind} of this name has left its state, and {change.what}"
                        f" differs from it: give the {kind} a new name",
                    )
        return _make_kept_change(what, why)

    def _compare_entry(self, section: str, name: str) -> Iterator[SpecChange]:
        """The fields of an entry that is in both specs, by their rules."""
        before = getattr(self._old, section)[name]
        after = getattr(self._new, section)[name]
        beside = _COMPARED_APART.get(section, set())
        # The columns of the rows are compared as one for all sources. Where only one of the specs
        # has a `select`, the columns of the objects are another matter.
        if section == "sources" and before.select and after.select:
            beside = set()
        left, right = (
            one.model_dump(mode="json", by_alias=True, exclude=beside) for one in (before, after)
        )
        for path in _list_differing_paths(left, right):
            rule = find_field_rule(PipelineSpec, f"{section}.*.{path}")
            given = _find_value(left, path), _find_value(right, path)
            where = f"{section}.{name}.{path}"
            if section == "windows" and self._reopens(name, rule):
                yield _make_refused_change(where, _REOPENED)
            elif self._holds(rule, name, *given):
                yield SpecChange(where, rule.effect, rule.why)
            else:
                yield _make_kept_change(where)

    def _holds(self, rule: FieldRule, name: str, old: object, new: object) -> bool:
        """Whether a rule of a field below `name` holds in this state."""
        live = self._live
        is_open = name in live.windows
        return {
            RuleCondition.ALWAYS: True,
            RuleCondition.OPEN: is_open,
            RuleCondition.PRESENCE: is_open and (old is None) != (new is None),
            RuleCondition.WAITING: live.buffered > 0,
            RuleCondition.STREAM: name in live.streams,
            RuleCondition.HAD: old is not None,
            RuleCondition.REOPENS: False,
            RuleCondition.OWN: False,
        }[rule.when]

    def _reopens(self, window: str, rule: FieldRule) -> bool:
        """Whether windows that were purged would be open again.

        `session_touch` and `session_close` may move the end by a tick.
        """
        if rule.when not in (RuleCondition.REOPENS, RuleCondition.OPEN):
            return False
        bounds = [
            _compute_purge_bound(spec.windows[window], self._live.frontier)
            for spec in (self._old, self._new)
        ]
        return bounds[1] < bounds[0]

    def _compare_columns(self) -> Iterator[SpecChange]:
        old, new = self._old.row_columns, self._new.row_columns
        waiting = self._live.buffered
        for name in sorted(old.keys() | new.keys()):
            left, right = old.get(name), new.get(name)
            if left == right:
                continue
            # A column changes in three ways; each has another effect on tables and on buffered
            # rows.
            what = f"schema.{name} {_name_change(left, right, f'is {right} instead of {left}')}"
            conflict = None if right is None else self._find_type_conflict(EVENTS, name)
            if conflict is not None:
                yield _make_refused_change(what, conflict)
            # Buffered rows would lose their values without a trace. A new column is null in them.
            elif waiting and right is None:
                yield _make_refused_change(
                    what,
                    f"rows of the old shape wait in the order buffer: {_RESTART_ADVICE}",
                )
            else:
                yield _make_kept_change(
                    what, "tables keep the column; rows without it read as null"
                )

    def _compare_windows(self) -> Iterator[SpecChange]:
        old, new, live = self._old, self._new, self._live
        for name in new.windows.keys() - old.windows.keys():
            yield self._judge_added_window(name)
        for name in old.windows.keys() - new.windows.keys():
            what = (
                "its open windows are never emitted; its table stays"
                if name in live.windows
                else "its table stays"
            )
            yield SpecChange(f"windows.{name} removed", ChangeEffect.DROPPED, what)
        for name in sorted(old.windows.keys() & new.windows.keys()):
            yield from self._compare_aggregates(name)
            yield from self._compare_entry("windows", name)

    def _judge_added_window(self, name: str) -> SpecChange:
        what = f"windows.{name} added"
        # Its windows of before may get rows again, and their results would be replaced by those of
        # these rows alone.
        if any(name in spec.windows for spec in self._history.lineage):
            return _make_refused_change(
                what,
                "its table has results of an earlier window of this name, which late rows would"
                " replace: give it a new name, or restore to where the earlier one was in the spec",
            )
        for column in self._types[name]:
            conflict = self._find_type_conflict(name, column)
            if conflict is not None:
                return _make_refused_change(what, conflict)
        has_edges = any(source.edges for source in self._new.sources.values())
        return _make_kept_change(
            what,
            "begins empty: a window that is open already counts only rows read from now on"
            + (", and the edges that are open" if has_edges else ""),
        )

    def _compare_aggregates(self, window: str) -> Iterator[SpecChange]:
        old, new = (spec.windows[window].aggregates for spec in (self._old, self._new))
        for name in sorted(old.keys() | new.keys()):
            before, after = old.get(name), new.get(name)
            if before == after:
                continue
            what = f"windows.{window}.aggregates.{name} {_name_change(before, after, 'changed')}"
            conflict = None if after is None else self._find_type_conflict(window, name)
            if window in self._live.windows:
                yield _make_refused_change(
                    what,
                    "open windows hold partial results without it: add it as a window with a new"
                    " name",
                )
            elif conflict is not None:
                yield _make_refused_change(what, conflict)
            else:
                yield _make_kept_change(what, "no window is open; older results read as null there")

    def _compare_rest(self) -> Iterator[SpecChange]:
        """The fields outside of the sections above."""
        # `name` cannot differ: both specs were found under it.
        beside = {"name", "sources", "windows", "streams", "pipes", "reducers"}
        left, right = (
            spec.model_dump(mode="json", by_alias=True, exclude=beside)
            for spec in (self._old, self._new)
        )
        for path in _list_differing_paths(left, right):
            rule = find_field_rule(PipelineSpec, path)
            if not rule.is_compared:
                continue
            given = _find_value(left, path), _find_value(right, path)
            if self._holds(rule, "", *given):
                yield SpecChange(path, rule.effect, rule.why)
            else:
                yield _make_kept_change(path)


def _compute_purge_bound(window: WindowSpec, frontier: int) -> int:
    """Return up to which end the windows are purged at a frontier, in ticks; TICK_MIN: none is."""
    if frontier in (TICK_MIN, TICK_MAX):
        return frontier
    if window.lateness is None:
        return TICK_MIN
    return frontier - window.lateness - int(window.closes_after_end)


def _name_change(before: object, after: object, change: str) -> str:
    return "added" if before is None else "removed" if after is None else change


def _compare_orders(old: PipelineSpec, new: PipelineSpec) -> Iterator[SpecChange]:
    for path, names in old.orders.items():
        after = new.orders.get(path, [])
        if [n for n in names if n in after] != [n for n in after if n in names]:
            yield _make_kept_change(f"{path} in another order")


def _list_differing_paths(left: JsonView, right: JsonView, prefix: str = "") -> Iterator[str]:
    """Dotted names of the leaves that differ; an aggregate is one."""
    for name in sorted(left.keys() | right.keys()):
        one, other = left.get(name), right.get(name)
        if one == other:
            continue
        is_aggregate = isinstance(one, Mapping) and one.keys() == Aggregate.model_fields.keys()
        if isinstance(one, Mapping) and isinstance(other, Mapping) and not is_aggregate:
            yield from _list_differing_paths(one, other, f"{prefix}{name}.")
        else:
            yield prefix + name


def _find_value(data: JsonView, path: str) -> object:
    """The value of a dotted path; None where it ends before."""
    value: object = data
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
