"""What the rows of one slice are.

Data, barrier, punctuation, dead letter, quarantined or violating.

Rows are judged in the order of their partition. What must be known of earlier rows is carried from
cut to cut in `MemberSurvey.punctuation_state`, so the outcome does not depend on where the cuts
lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import duckdb
import pyarrow as pa
import sqlglot

from tests.oracle.tables import from_arrow
from tidegate.errors import PoisonError
from tidegate.jobs.engine.arrow_tables import to_arrow_type
from tidegate.jobs.engine.errors import BrokenRuleError
from tidegate.jobs.engine.interfaces import Slice
from tidegate.jobs.eventtime.decision_types import BarrierRow, Member, MemberSurvey
from tidegate.jobs.spec.event_time_options import PunctuationOptions
from tidegate.jobs.spec.pipeline import SourceSpec
from tidegate.jobs.spec.table_layout import DeadLetterReason
from tidegate.time_units import TICK_MIN, saturate_ticks


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as a source gives it; timestamps are ticks.

    `bad` is (reason, detail) if it could not be converted.
    """

    seq: int
    values: dict[str, Any]
    object_key: str | None = None
    etag: str | None = None
    bad: tuple[DeadLetterReason, str] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One data row. `time` and `end` follow an adjustment; the interval is half-open."""

    member: Member
    seq: int
    time: int
    end: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row for the dead letters."""

    member: Member
    raw: RawRow
    reason: DeadLetterReason
    detail: str


@dataclass
class SliceRows:
    """The rows of one slice, sorted out, and the survey of them.

    Attributes:
        data: rows that go on, in order.
        dead: rows for the dead letters.
        quarantined: rows that `max_jump` set aside.
        violations: rows before their member's punctuation that are error rows, with that
            punctuation.
        dropped: such rows that the policy drops.
        filtered: how many rows `where` left out.
        rule_dropped: how many rows a rule of severity ``drop`` removed.
        broken: name of a count of `checkpoints.row_counts` -> rows that broke rules.
    """

    survey: MemberSurvey
    data: list[Row] = field(default_factory=list)
    dead: list[BadRow] = field(default_factory=list)
    quarantined: list[Row] = field(default_factory=list)
    violations: list[tuple[Row, int]] = field(default_factory=list)
    dropped: list[Row] = field(default_factory=list)
    filtered: int = 0
    rule_dropped: int = 0
    broken: Counter[str] = field(default_factory=Counter)

    @property
    def read(self) -> int:
        """Rows with a disposition: everything but barriers and punctuation."""
        return (
            len(self.data)
            + len(self.dead)
            + len(self.quarantined)
            + len(self.violations)
            + len(self.dropped)
            + self.rule_dropped
            + self.filtered
        )


def carried(state: Mapping[str, Any], member: Member) -> dict[str, int]:
    """What the rows of earlier cuts left behind for this member."""
    found = state.get("members", {}).get(str(member)) or {}
    return dict(found.get("generator") or {})


def read_rows(
    source: SourceSpec, part: Slice, raws: Iterable[RawRow], state: Mapping[str, Any]
) -> SliceRows:
    """Sort out the rows of a slice, up to and including its first barrier row.

    Raises:
        PoisonError: a bad row under ``on_bad: fail``, or punctuation going back under ``regress:
            error``.
    """
    clock = state.get("clock")
    wall = None if clock is None else clock + state.get("uncounted", 0)
    reader = PartitionReader(source, part.member, carried(state, part.member), wall)
    for raw in raws:
        reader.take(raw)
        if reader.barrier is not None:
            break
    return reader.result(part)


class PartitionReader:
    """Judges the rows of one partition, one at a time; `memory` is what `memory()` gave last time."""

    def __init__(
        self, source: SourceSpec, member: Member, memory: dict[str, int], now: int | None
    ) -> None:
        self.source = source
        self.member = member
        self.now = now
        self.newest = memory.get("newest")
        self.last = memory.get("last")
        self.punctuation = memory.get("current")
        self.events = memory.get("events", 0)
        self.base = memory.get("base")
        self.barrier: BarrierRow | None = None
        self.rows = SliceRows(MemberSurvey(member))
        self.times: list[int] = []
        self.counts = {"violations": 0, "regressions": 0}

    def take(self, raw: RawRow) -> None:
        """One row, in the order of the partition."""
        if raw.bad is not None:
            self._bury(raw, *raw.bad)
            return
        source = self.source
        passed = source.where is None or evaluate(source.where, source.columns, raw) is True
        if source.select:
            values = {n: evaluate(sql, source.columns, raw) for n, sql in source.select.items()}
            raw = replace(raw, values=values)
        marks, time = source.barriers, raw.values.get(self.source.event_time)
        kind = raw.values.get(marks.kind) if marks else None
        if marks is None or kind is None or kind == marks.data:
            if passed:
                self._data(raw, time)
            else:
                self.rows.filtered += 1
        elif kind in marks.types:
            number = raw.values.get(marks.id) if marks.id else None
            self.barrier = BarrierRow(
                raw.seq, kind, number, time if time is not None else (self.newest or 0)
            )
        elif kind == marks.punctuation and time is not None:
            self._punctuate(raw, time)
        else:
            self._bury(
                raw,
                "bad_value",
                f"{marks.kind} = {kind!r} is no data, barrier type or punctuation with a time",
            )

    def result(self, part: Slice) -> SliceRows:
        """All rows taken so far, with their survey."""
        kept = max((row.time for row in self.rows.data), default=TICK_MIN)
        self.rows.survey = MemberSurvey(
            member=self.member,
            rows=len(self.times),
            min_time=min(self.times, default=None),
            max_time=max(self.times, default=None),
            barrier=self.barrier,
            punctuation=self.punctuation,
            punctuation_state=self.memory() or None,
            pending=part.pending,
            done=part.done,
            quarantined=len(self.rows.quarantined),
            dead=len(self.rows.dead) + self.rows.rule_dropped + self.rows.filtered,
            newest_kept=kept if self.times and kept != max(self.times) else None,
            newest_end=max((row.end for row in self.rows.data), default=TICK_MIN),
            **self.counts,
        )
        return self.rows

    def memory(self) -> dict[str, int]:
        """What must be known of these rows when the next ones come."""
        memory = {
            "newest": self.newest,
            "last": self.last,
            "current": self.punctuation,
            "events": self.events or None,
            "base": self.base,
        }
        return {name: value for name, value in memory.items() if value is not None}

    def _bury(self, raw: RawRow, reason: DeadLetterReason, detail: str) -> None:
        if self.source.on_bad == "fail":
            raise PoisonError(
                f"{self.member} row {raw.seq}: {detail}",
                code=f"row.{reason}",
                kept="everything sealed so far",
                advice="mend the row at its origin, or set on_bad: dead_letter",
            )
        self.rows.dead.append(BadRow(self.member, raw, reason, detail))

    def _data(self, raw: RawRow, time: int | None) -> None:
        if self._breaks_rule(raw):
            return
        if time is None:
            self._bury(raw, "no_event_time", f"{self.source.event_time} is null")
            return
        if self.source.min_event_time is not None and time < self.source.min_event_time:
            self._bury(
                raw, "before_min_event_time", f"{self.source.event_time} is before min_event_time"
            )
            return
        end = raw.values.get(self.source.end_time) if self.source.end_time else None
        if end is not None and end <= time:
            self._bury(
                raw, "bad_value", f"{self.source.end_time} is not after {self.source.event_time}"
            )
            return
        row = Row(self.member, raw.seq, time, time + 1 if end is None else end, raw.values)
        if self._jumps(time):
            self.rows.quarantined.append(row)
            return
        self._generate_ahead(time)
        self._observe(time)
        self._judge(row)
        self._generate_after()

    def _breaks_rule(self, raw: RawRow) -> bool:
        """Whether a rule removes the row; counts the rules that it breaks."""
        columns, rules = self.source.row_columns, self.source.rules
        broken = [n for n, r in rules.items() if evaluate(r.predicate, columns, raw) is not True]
        first = next((n for n in broken if self.source.rules[n].severity != "warn"), None)
        self.rows.broken.update(f"rule:{n}" for n in ([first] if first else broken))
        if first is None:
            self.rows.broken["rule_warned"] += bool(broken)
            return False
        rule = self.source.rules[first]
        if rule.severity == "fail":
            raise BrokenRuleError(
                f"row {raw.seq} breaks rule {first} of source {self.member}: {raw.values}",
                code="row.rule_failed",
            )
        if rule.severity == "drop":
            self.rows.rule_dropped += 1
        else:
            self.rows.dead.append(BadRow(self.member, raw, "rule_quarantined", first))
        return True

    def _jumps(self, time: int) -> bool:
        jump = self.source.max_jump
        if jump is None or self.now is None:
            return False
        return time > self.now + jump and (self.newest is None or time > self.newest + jump)

    def _observe(self, time: int) -> None:
        self.last = time
        self.newest = time if self.newest is None else max(self.newest, time)
        self.times.append(time)

    def _judge(self, row: Row) -> None:
        mark = self.punctuation
        if mark is None or row.time >= mark:
            self.rows.data.append(row)
            return
        self.counts["violations"] += 1
        policy = self.source.punctuation.on_violation if self.source.punctuation else "error"
        if policy == "error":
            self.rows.violations.append((row, mark))
        elif policy == "adjust" and row.end > mark:
            self.rows.data.append(adjusted(row, mark, self.source.event_time))
        else:  # a point row cannot be adjusted: its end is not beyond the punctuation
            self.rows.dropped.append(row)

    def _punctuate(self, raw: RawRow, time: int) -> None:
        stamp = time + self._shift
        if self.punctuation is not None and stamp < self.punctuation:
            self.counts["regressions"] += 1
            if self.source.punctuation is not None and self.source.punctuation.regress == "error":
                raise PoisonError(
                    f"{self.member} row {raw.seq}: punctuation went back from {self.punctuation} to"
                    f" {stamp}",
                    code="punctuation.regress",
                    kept="everything sealed so far",
                    advice="mend the source, or set punctuation.regress: ignore",
                )
        self._advance(stamp)

    def _generate_ahead(self, time: int) -> None:
        """`align: floor`: a multiple of the span, before the row that passes it."""
        options = self.source.punctuation
        if options is None or options.align != "floor" or options.every_span is None:
            return
        if self.newest is None or time > self.newest:
            self._advance(
                min(time, (time - options.delay) // options.every_span * options.every_span)
            )

    def _generate_after(self) -> None:
        """`align: after`: newest row - delay, after N events or a span of event time."""
        options = self.source.punctuation
        if (
            options is None
            or not options.is_generated
            or options.align == "floor"
            or self.newest is None
        ):
            return
        self.events += 1
        self.base = self.newest if self.base is None else self.base
        if self._due(options, self.newest - self.base):
            self.events, self.base = 0, self.newest
            self._advance(self.newest - options.delay + self._shift)

    def _due(self, options: PunctuationOptions, span: int) -> bool:
        by_events = options.every_events is not None and self.events >= options.every_events
        return by_events or (options.every_span is not None and span >= options.every_span)

    def _advance(self, stamp: int) -> None:
        stamp = saturate_ticks(stamp)
        self.punctuation = stamp if self.punctuation is None else max(self.punctuation, stamp)

    @property
    def _shift(self) -> int:
        return 1 if self.source.frontier == "inclusive" else 0


def adjusted(row: Row, start: int, column: str) -> Row:
    """The row with its start moved to `start`."""
    return replace(row, time=start, values={**row.values, column: start})


def evaluate(sql: str, columns: Mapping[str, str], raw: RawRow) -> Any:
    """The value of Spark SQL for a row, by DuckDB; times in ticks."""
    table = pa.table(
        {
            name: pa.array([raw.values.get(name)], pa.int64()).cast(to_arrow_type(kind))
            if kind == "timestamp"
            else pa.array([raw.values.get(name)], None if "<" in kind else to_arrow_type(kind))
            for name, kind in columns.items()
        }
    )
    db = _open_engine()
    db.register("own", table)
    nested = [
        f'cast("{name}" as {sqlglot.exp.DataType.build(kind, dialect="spark").sql("duckdb")}) as "{name}"'
        for name, kind in columns.items()
        if "<" in kind
    ]
    row = f"select * replace ({', '.join(nested)}) from own" if nested else "from own"
    found = db.sql(f"select ({_render_for_duckdb(sql)}) as v from ({row})").to_arrow_table()["v"]
    return from_arrow(found)[0]


@cache
def _render_for_duckdb(sql: str) -> str:
    return sqlglot.transpile(sql, read="spark", write="duckdb")[0]


@cache
def _open_engine() -> duckdb.DuckDBPyConnection:
    db = duckdb.connect()
    db.execute("set timezone = 'UTC'")
    return db
