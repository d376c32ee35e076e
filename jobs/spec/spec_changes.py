"""Decides what a changed spec does to the state of a checkpoint.

It is kept, dropped, or the change is refused.

State is laid out by the spec that wrote it: partial aggregates by their window, buffered
rows by their columns, positions by the order of a source's objects. A change that would read one as
the other is refused; if only open windows or buffered rows matter, only while there are any. What
belongs to a removed source or window is dropped. Everything else is kept and applies from the next
epoch on; frontiers never move back. docs/recovery.md has the table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tidegate.json_types import JsonView, read_data_file

from .pipeline import NON_DATA_SECTIONS, PipelineSpec, SourceSpec
from .window_specs import WindowSpec

_RESTART_ADVICE = "start again under another name, or let the driver finish with the old spec first"


_RULES = read_data_file(__package__, "spec_changes.toml")


class ChangeEffect(StrEnum):
    """What a change of the spec does: it keeps the state it concerns, drops it, or is refused."""

    KEPT = "kept"
    DROPPED = "dropped"
    REFUSED = "refused"


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
    """

    windows: frozenset[str] = frozenset()
    buffered: int = 0


def compare_specs(old: PipelineSpec, new: PipelineSpec, live: LiveState) -> list[SpecChange]:
    """Return every difference outside `NON_DATA_SECTIONS`: refused ones first, then dropped, kept.

    The names of the pipelines are not compared.
    """
    found = [
        *_compare_sources(old, new, live),
        *_compare_columns(old, new, live),
        *_compare_windows(old, new, live),
        *_compare_rest(old, new, live),
        *_compare_orders(old, new),
    ]
    # What stops a restart comes first; the list may be long.
    order = [*reversed(ChangeEffect)]
    return sorted(found, key=lambda change: order.index(change.verdict))


def _make_kept_change(what: str, why: str = "applies from the next epoch on") -> SpecChange:
    return SpecChange(what, ChangeEffect.KEPT, why)


def _make_refused_change(what: str, why: str) -> SpecChange:
    return SpecChange(what, ChangeEffect.REFUSED, why)


def _compare_sources(old: PipelineSpec, new: PipelineSpec, live: LiveState) -> Iterator[SpecChange]:
    for name in new.sources.keys() - old.sources.keys():
        how = (
            "at the frontier: its older rows are late"
            if new.coalesce.joins == "at_F"
            else "and holds the frontier until it has one"
        )
        yield _make_kept_change(
            f"sources.{name} added", f"is read from its beginning; it joins {how}"
        )
    for name in old.sources.keys() - new.sources.keys():
        rows = (
            f"; up to {live.buffered:,} buffered rows still leave in order" if live.buffered else ""
        )
        # An end edge of a removed source is never read, so its open edges would count without end.
        rows += "; its open edges count no more" if old.sources[name].edges else ""
        yield SpecChange(
            f"sources.{name} removed",
            ChangeEffect.DROPPED,
            f"its frontier does not count any more{rows}",
        )
    for name in sorted(old.sources.keys() & new.sources.keys()):
        yield from _compare_source(f"sources.{name}", old.sources[name], new.sources[name])


def _compare_source(where: str, old: SourceSpec, new: SourceSpec) -> Iterator[SpecChange]:
    # The columns of the rows are compared as one for all sources.
    options, sections = _RULES["options"], _RULES["sections"]
    beside = set() if old.select and new.select else {"columns"}
    left, right = (one.model_dump(mode="json", exclude=beside) for one in (old, new))
    for path in _list_differing_paths(left, right):
        # The rule is by the place of the option, not by its value: an unknown option is kept,
        # because only those listed give old positions or rows another meaning.
        reason = options.get(path) or sections.get(path.partition(".")[0])
        if reason:
            yield _make_refused_change(f"{where}.{path}", f"{reason}: give the source a new name")
        elif path == "lag":
            yield _make_kept_change(
                f"{where}.lag",
                "a smaller one counts at once; with a larger one the frontier does not move until"
                " the rows caught up",
            )
        else:
            yield _make_kept_change(f"{where}.{path}")


def _compare_columns(old: PipelineSpec, new: PipelineSpec, live: LiveState) -> Iterator[SpecChange]:
    for name in sorted(old.columns.keys() | new.columns.keys()):
        left, right = old.columns.get(name), new.columns.get(name)
        if left == right:
            continue
        # A column changes in three ways; each has another effect on tables and on buffered rows.
        what = f"schema.{name} {_name_change(left, right, f'is {right} instead of {left}')}"
        if left is not None and right is not None:
            yield _make_refused_change(
                what,
                f"a table's column has one type: give the column a new name, or {_RESTART_ADVICE}",
            )
        # Buffered rows would lose their values without a trace. A new column is null in them.
        elif live.buffered and right is None:
            yield _make_refused_change(
                what,
                f"{live.buffered:,} rows of the old shape wait in the order buffer:"
                f" {_RESTART_ADVICE}",
            )
        else:
            yield _make_kept_change(what, "tables keep the column; rows without it read as null")


def _compare_windows(old: PipelineSpec, new: PipelineSpec, live: LiveState) -> Iterator[SpecChange]:
    for name in new.windows.keys() - old.windows.keys():
        yield _make_kept_change(
            f"windows.{name} added",
            "begins empty: a window that is open already counts only rows read from now on"
            + (
                ", and the edges that are open"
                if any(s.edges for s in new.sources.values())
                else ""
            ),
        )
    for name in old.windows.keys() - new.windows.keys():
        what = (
            "its open windows are never emitted; its table stays"
            if name in live.windows
            else "its table stays"
        )
        yield SpecChange(f"windows.{name} removed", ChangeEffect.DROPPED, what)
    for name in sorted(old.windows.keys() & new.windows.keys()):
        yield from _compare_window(
            f"windows.{name}", old.windows[name], new.windows[name], name in live.windows
        )


def _compare_window(
    where: str, old: WindowSpec, new: WindowSpec, is_open: bool
) -> Iterator[SpecChange]:
    yield from _compare_aggregates(where, old, new, is_open)
    left, right = (one.model_dump(mode="json", exclude={"aggregates"}) for one in (old, new))
    for path in _list_differing_paths(left, right):
        if path in _RULES["results"]:
            yield _make_refused_change(
                f"{where}.{path}",
                "its table would hold two kinds of results: add it as a window with a new name",
            )
        elif path in _RULES["counting"] and is_open:
            yield _make_refused_change(
                f"{where}.{path}",
                "results of open windows are counted by the old rule: use a new name",
            )
        else:
            yield _make_kept_change(f"{where}.{path}")


def _compare_aggregates(
    where: str, old: WindowSpec, new: WindowSpec, is_open: bool
) -> Iterator[SpecChange]:
    for name in sorted(old.aggregates.keys() | new.aggregates.keys()):
        before, after = old.aggregates.get(name), new.aggregates.get(name)
        if before == after:
            continue
        what = f"{where}.aggregates.{name} {_name_change(before, after, 'changed')}"
        yield (
            _make_refused_change(
                what,
                "open windows hold partial results without it: add it as a window with a new name",
            )
            if is_open
            else _make_kept_change(what, "no window is open; older results read as null there")
        )


def _name_change(before: object, after: object, change: str) -> str:
    return "added" if before is None else "removed" if after is None else change


def _compare_orders(old: PipelineSpec, new: PipelineSpec) -> Iterator[SpecChange]:
    for path, names in old.orders.items():
        after = new.orders.get(path, [])
        if [n for n in names if n in after] != [n for n in after if n in names]:
            yield _make_kept_change(f"{path} in another order")


def _compare_rest(old: PipelineSpec, new: PipelineSpec, live: LiveState) -> Iterator[SpecChange]:
    """What has no rule of its own, and the rules of the order buffer."""
    # `name` cannot differ: both specs were found under it.
    beside = {*NON_DATA_SECTIONS, "name", "sources", "windows"}
    left, right = (spec.model_dump(mode="json", exclude=beside) for spec in (old, new))
    for path in _list_differing_paths(left, right):
        if live.buffered and path.startswith(("release.mode", "release.glom")):
            yield _make_refused_change(
                path, f"{live.buffered:,} rows wait by the old rule: {_RESTART_ADVICE}"
            )
        else:
            yield _make_kept_change(path)


def _list_differing_paths(left: JsonView, right: JsonView, prefix: str = "") -> Iterator[str]:
    """Dotted names of the leaves that differ."""
    for name in sorted(left.keys() | right.keys()):
        one, other = left.get(name), right.get(name)
        if one == other:
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _list_differing_paths(one, other, f"{prefix}{name}.")
        else:
            yield prefix + name
