"""Windows of a pipeline and their aggregates (docs/semantics.md, section 5)."""

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, model_validator

from tidegate.time_units import PositiveDuration, SignedDuration

from .event_time_options import LatePolicy, OptionalDuration, SpecModel


class WindowKind(StrEnum):
    """Shapes of windows."""

    TUMBLING = "tumbling"
    SLIDING = "sliding"
    SESSION = "session"


class AggregateFunction(StrEnum):
    """The aggregates, each with a mergeable partial state.

    ``sql`` is the exception: it runs an SQL expression over the kept rows of the window.
    """

    COUNT = "count"
    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    FIRST = "first"
    LAST = "last"
    APPROX_DISTINCT = "approx_distinct"
    APPROX_QUANTILE = "approx_quantile"
    DISTINCT = "distinct"
    COLLECT = "collect"
    SQL = "sql"


# The greedy group takes everything up to the last parenthesis, so the expression may contain calls
# of its own.
_CALL_PATTERN = re.compile(r"^\s*(\w+)\s*\((.*)\)\s*$", re.DOTALL)


class Aggregate(SpecModel):
    """One aggregate column; YAML writes ``avg(delay)`` or ``approx_quantile(delay, 0.99)``."""

    function: AggregateFunction
    """Name of the aggregate function."""
    expression: str = "*"
    """A Spark SQL expression over the row's columns; ``*`` only for count.

    For ``sql`` an expression with Spark's own aggregates: the two greatest values are
    ``slice(reverse(array_sort(collect_list(x))), 1, 2)``.
    """
    argument: float | None = None
    """The quantile in (0, 1) for approx_quantile."""

    @model_validator(mode="before")
    @classmethod
    def _parse_call(cls, value: Any) -> Any:
        # The Python API passes the fields as a mapping.
        if not isinstance(value, str):
            return value
        match = _CALL_PATTERN.match(value)
        names = [*AggregateFunction]
        if value.count("(") > value.count(")"):
            raise ValueError(
                f"not an aggregate: {value!r}: in {{...}} a comma ends a value; write it in quotes"
            )
        if match is None or match[1] not in names:
            raise ValueError(
                f"not an aggregate: {value!r}; write FUNCTION(EXPRESSION) with FUNCTION one of"
                f" {', '.join(names)} (the median is approx_quantile(EXPRESSION, 0.5))"
            )
        function, expression = match[1], match[2].strip() or "*"
        if function == AggregateFunction.APPROX_QUANTILE:
            # The last comma separates the quantile: the expression itself may contain commas.
            expression, _, argument = expression.rpartition(",")
            return {
                "function": function,
                "expression": expression.strip(),
                "argument": argument.strip(),
            }
        return {"function": function, "expression": expression}

    def _list_problems(self) -> Iterator[str]:
        # Only a count has a value for a row without a column.
        if self.expression == "*" and self.function is not AggregateFunction.COUNT:
            yield f"{self.function.value}(*) makes no sense: name a column or an expression"
        if self.function is AggregateFunction.APPROX_QUANTILE and not (
            self.argument and 0 < self.argument < 1
        ):
            yield "approx_quantile(expression, q) needs 0 < q < 1"

    def __str__(self) -> str:
        inner = (
            self.expression if self.argument is None else f"{self.expression}, {self.argument:g}"
        )
        return f"{self.function.value}({inner})"


class WindowSpec(SpecModel):
    """One window of a pipeline: its shape, keys, aggregates and life.

    Windows take rows when they are read, not when they are released. A window is half-open,
    ``[start, end)``, and aligned to the epoch origin plus offset.
    """

    kind: WindowKind
    """Shape of the window."""
    size: PositiveDuration | None = None
    """Length of tumbling and sliding windows."""
    slide: PositiveDuration | None = None
    """Distance between starts of sliding windows."""
    gap: PositiveDuration | None = None
    """Session: the pause after which it ends."""
    offset: SignedDuration = 0
    """Shift of all window starts from the epoch origin."""
    keys: tuple[str, ...] = ()
    """Key columns; null is a key like any other."""
    aggregates: dict[str, Aggregate] = Field(min_length=1)
    """Output column -> aggregate."""
    lateness: OptionalDuration = 0
    """Allowed lateness. A window is purged when end + lateness <= F; ``never`` purges none."""
    late_unit: Literal["event", "window", "first_window"] = "window"
    """A row is late when its time is before F (``event``), when all its windows are purged
    (``window``), or when its first window is purged (``first_window``).
    """
    on_late: LatePolicy = LatePolicy.SIDE_OUTPUT
    """What happens to a row that is late for this window; ``emit_flagged`` acts like
    ``side_output``.
    """
    revisions: Literal["accumulate", "delta"] = "accumulate"
    """A later firing carries the whole window, or only the rows that arrived since the last one."""
    emit: Literal["close", "each_epoch", "complete"] = "close"
    """Emit a window when F passes its end, emit every changed window in each epoch, or emit all
    live windows.
    """
    session_touch: Literal["merge", "separate"] = "merge"
    """Sessions that touch become one, or stay separate."""
    session_late: Literal["merged", "own", "event"] = "merged"
    """Judge the row of a session after it was merged, by the window of the row alone, or by
    event time.
    """
    session_close: Literal["at_end", "after_end"] | None = None
    """A session closes at its end or after it.

    The default is ``after_end`` when touching sessions merge, ``at_end`` otherwise.
    """
    min_window_start: int | None = None
    """Windows that start before this instant (ticks) are not made."""
    fire_every: PositiveDuration | None = None
    """Also emit an open window each time F passes a multiple of this after the rows that opened
    it.
    """
    zero_rows: bool = False
    """Emit a row for empty windows between a key's first and last window."""

    def _list_problems(self) -> Iterator[str]:
        needs = {
            WindowKind.TUMBLING: ("size",),
            WindowKind.SLIDING: ("size", "slide"),
            WindowKind.SESSION: ("gap",),
        }[self.kind]
        for name in ("size", "slide", "gap"):
            # An option of another shape is refused: its writer expects an effect.
            present = getattr(self, name) is not None
            if present != (name in needs):
                verb = "needs" if name in needs else "has no"
                yield f"a {self.kind.value} window {verb} {name!r}"
        if self.zero_rows and self.kind is WindowKind.SESSION:
            yield "a session window has no 'zero_rows': between two sessions there is no window"
        # The other modes emit open windows in every epoch, more often than any `fire_every` would.
        if self.fire_every is not None and (self.emit != "close" or self.zero_rows):
            yield "'fire_every' goes with emit: close, and without 'zero_rows'"
        period = self.period
        # A larger offset names the same windows as its remainder, and is usually a wrong unit.
        if period is not None and abs(self.offset) >= period:
            yield "the offset must be smaller than the slide (tumbling: the size)"

    @property
    def period(self) -> int | None:
        """Ticks between window starts; None for sessions."""
        return self.slide if self.kind is WindowKind.SLIDING else self.size

    @property
    def keeps_rows(self) -> bool:
        """Whether its state has the rows themselves: of an aggregate in Spark SQL."""
        return any(w.function is AggregateFunction.SQL for w in self.aggregates.values())

    @property
    def is_folded_by_parts(self) -> bool:
        """Whether its rows become items, not partial aggregates of aligned windows."""
        return self.kind is WindowKind.SESSION or self.fire_every is not None

    @property
    def closes_after_end(self) -> bool:
        """Whether a session closes at ``end < F`` instead of ``end <= F``."""
        if self.kind is not WindowKind.SESSION:
            return False
        if self.session_close is None:
            # A row exactly at the end still joins a session whose neighbours merge, so the session
            # must stay open until F is beyond its end.
            return self.session_touch == "merge"
        return self.session_close == "after_end"
