"""Rows by disposition: what the counters of a manifest are called, and what follows from them.

docs/semantics.md, section 2, Counters, defines them. Movers and the engine name their counts here;
command line, Streams page, metrics, assets and quality checks read them through `RowCounts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from tidegate.jobs.spec.row_rules import FILTERED, RULE_QUARANTINED

LATE_ROWS = "late_rows"
FLAGGED = "flagged"
TARDY = "tardy"
DEAD_OBJECTS = "dead_objects"
DEAD_OBJECT_ROWS = "dead_object_rows"
NULLS_FILLED = "nulls_filled"
COLUMNS_LEFT_OUT = "columns_left_out"
RULE = "rule"
"""The reason of rows that a row rule dropped."""
RULE_DROPPED = "dropped:events:rule"
RULE_WARNED = "rule_warned"
ROW_EQUATION = (
    *("read", "released", "late", "dropped", "rejected", "dead_lettered"),
    *(RULE_QUARANTINED, FILTERED),
)
"""Dispositions for the events output; with the retained rows they are equal on both sides."""
ROW_NOTES = (
    *(LATE_ROWS, FLAGGED, TARDY, DEAD_OBJECTS, DEAD_OBJECT_ROWS, NULLS_FILLED),
    *(COLUMNS_LEFT_OUT, RULE_WARNED),
)
"""Counts besides them: parts of these rows, rows counted a second time, or objects."""

PerSource = Mapping[str, Mapping[str, int]]
"""Source -> name of a count -> rows, as `Counters.per_source` and `EpochCounters.per_source`."""

_EVENTS = "events"  # checkpoints/ knows no table of jobs/, and the manifest has this name
_COUNTED_ALONE = {"rejected", "flagged"}  # reasons that are dispositions of the events
# Rows that no window is offered: they were set aside before any output judged them.
_SET_ASIDE = tuple(
    f"{disposition}:{_EVENTS}:{reason}"
    for disposition in ("late", "dropped")
    for reason in ("max_jump", "cti_violation")
)


def name_late_counts(output: str, reason: str, *, dropped: bool = False) -> list[str]:
    """Return the counts to which a row that misses an output belongs.

    The first one is its disposition. A second one repeats it with a reason other than the usual
    one of that output.
    """
    disposition = "dropped" if dropped else "late"
    if output == _EVENTS and reason in _COUNTED_ALONE and not dropped:
        return [reason]
    first = disposition if output == _EVENTS else f"{disposition}:{output}"
    if reason == _name_usual_reason(output):
        return [first]
    return [first, f"{disposition}:{output}:{reason}"]


def _name_usual_reason(output: str) -> str:
    return "late_order" if output == _EVENTS else "late_window"


def name_stream_rejections(stream: str) -> str:
    """Return the count of the rows that a stream rejected."""
    return f"rejected:{stream}"


def name_broken_rule(rule: str) -> str:
    """Return the count of the rows that broke a row rule of their source."""
    return f"{RULE}:{rule}"


def merge_counts(*parts: PerSource) -> dict[str, dict[str, int]]:
    """Return the sums of counts by source, sorted by source."""
    sums: dict[str, Counter[str]] = {}
    for part in parts:
        for source, counts in part.items():
            sums.setdefault(source, Counter()).update(counts)
    return {source: dict(counts) for source, counts in sorted(sums.items())}


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows of one or several sources, of one epoch or of all epochs of a lineage.

    Indexing with the name of a count gives its rows, 0 if there are none.

    Attributes:
        counts: name of a count -> rows.
    """

    counts: Mapping[str, int]

    @classmethod
    def of_source(cls, counts: Mapping[str, int]) -> Self:
        """Read the counts of one source.

        Epochs of older versions did not count the rows that were late for several outputs once.
        The greatest count of one output is used for them, which is a lower bound.
        """
        plain = cls(counts)
        late = max(counts.get(LATE_ROWS, 0), *plain.late_by_output.values(), 0)
        return cls({**counts, LATE_ROWS: late})

    @classmethod
    def of_sources(cls, per_source: PerSource) -> Self:
        """Read and add up the counts of all sources."""
        return cls.add_up(cls.of_source(counts) for counts in per_source.values())

    @classmethod
    def add_up(cls, parts: Iterable[RowCounts]) -> Self:
        """Return the sums."""
        sums: Counter[str] = Counter()
        for part in parts:
            sums.update(part.counts)
        return cls(dict(sums))

    def since(self, before: RowCounts) -> RowCounts:
        """Return what came after `before`, an earlier state of the same lineage."""
        names = {*self.counts, *before.counts}
        return RowCounts({name: self[name] - before[name] for name in sorted(names)})

    def __getitem__(self, name: str) -> int:
        return self.counts.get(name, 0)

    @property
    def late_rows(self) -> int:
        """Input rows that were late for at least one output; each counts once."""
        return self[LATE_ROWS]

    @property
    def late_by_output(self) -> dict[str, int]:
        """Output -> rows that were late for it, whatever became of them; outputs with any."""
        found = {_EVENTS: sum(self[name] for name in ("late", "dropped", "rejected", FLAGGED))}
        found[_EVENTS] -= self[RULE_DROPPED]  # such a row was not late
        for name, rows in self.counts.items():
            disposition, _, output = name.partition(":")
            if disposition in ("late", "dropped") and output and ":" not in output:
                found[output] = found.get(output, 0) + rows
        return {output: rows for output, rows in found.items() if rows}

    @property
    def late_by_reason(self) -> dict[tuple[str, str, str], int]:
        """(output, disposition, reason) -> rows that missed the output; drops by a row rule too."""
        found: Counter[tuple[str, str, str]] = Counter()
        for name, rows in self.counts.items():
            disposition, output, reason = [*name.split(":"), "", ""][:3]
            output = output or _EVENTS
            if disposition in ("late", "dropped"):
                usual = (output, disposition, _name_usual_reason(output))
                found[output, disposition, reason] += rows if reason else 0
                found[usual] += -rows if reason else rows
            elif name in _COUNTED_ALONE:
                found[output, name, name] += rows
        return {key: rows for key, rows in sorted(found.items()) if rows}

    @property
    def late_ratio(self) -> float | None:
        """Share of the rows read that were late for at least one output; None without rows."""
        return self.late_rows / self["read"] if self["read"] else None

    def count_offered(self, output: str) -> int:
        """Return how many rows an output was offered.

        Rows that are dead or filtered, or that a rule removed, are offered to no output. Rows that
        were set aside before they were judged (far in the future, or below their own punctuation)
        missed the events, and no window saw them.
        """
        aside = 0 if output == _EVENTS else sum(self[name] for name in _SET_ASIDE)
        stopped = ("dead_lettered", RULE_QUARANTINED, RULE_DROPPED, FILTERED)
        return self["read"] - sum(self[name] for name in stopped) - aside

    def late_share(self, output: str) -> float | None:
        """Share of the rows offered to an output that were late for it; None if none was."""
        offered = self.count_offered(output)
        return self.late_by_output.get(output, 0) / offered if offered else None

    def count_stream_rejections(self) -> dict[str, int]:
        """Return stream -> rows that it rejected; a row of it was made of the source's row."""
        return self._select_by_prefix(name_stream_rejections(""))

    def count_broken_rules(self) -> dict[str, int]:
        """Return row rule -> rows that broke it, whatever became of them."""
        return self._select_by_prefix(name_broken_rule(""))

    def _select_by_prefix(self, prefix: str) -> dict[str, int]:
        return {n.removeprefix(prefix): r for n, r in self.counts.items() if n.startswith(prefix)}

    def to_record(self) -> dict[str, Any]:
        """Return the JSON-ready form that the command line and the Streams page show."""
        late = self.late_by_output
        return {
            "late_ratio": self.late_ratio,
            "late_by_output": late,
            "late_share": {output: self.late_share(output) for output in late},
            "stream_rejections": self.count_stream_rejections(),
            "rules": self.count_broken_rules(),
            **{name: self[name] for name in (RULE_QUARANTINED, FILTERED, *ROW_NOTES)},
        }
