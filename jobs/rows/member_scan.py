"""The times of one member's rows, in order: what depends on the rows before a row.

Punctuation and `max_jump` are about a row and its predecessors, so they are settled here,
on columns of numbers and without a step per row; what must be known of earlier cuts is carried in
`MemberSurvey.punctuation_state`. The few rows that are not plain data are named by position;
they are moved as all others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.jobs.advise.lag_advice import GAMMA
from tidegate.jobs.eventtime.decision_types import BarrierRow, Member, MemberSurvey
from tidegate.jobs.eventtime.pipeline_clock import read_pipeline_time
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import JsonView
from tidegate.time_units import TICK_MAX, TICK_MIN, saturate_ticks

from .errors import PUNCTUATION_REGRESSED

DATA = 0
BARRIER = 1
PUNCTUATION = 2
DEAD = 3

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class MemberColumns:
    """Rows of one slice in order.

    Attributes:
        times, ends: event time and exclusive end in ticks; `TICK_MIN` as a time: there is none.
        kinds: DATA, BARRIER, PUNCTUATION or DEAD.
        barrier: (type, id) of the first barrier row, if there is one.
    """

    seqs: Ints
    times: Ints
    ends: Ints
    kinds: NDArray[np.int8]
    barrier: tuple[str, int | None] | None = None


VERDICT_SCHEMA: Final = pa.schema(
    {"_vseq": pa.int64(), "_verdict": pa.string(), "_mark": pa.int64()}
)
"""Of rows that are not plain data.

The verdict is max_jump, cti_violation, dropped or adjust. `_mark` is the punctuation that the row
missed, in ticks; null for max_jump."""


@dataclass(slots=True)
class MemberScan:
    """What a slice holds.

    Attributes:
        verdicts: the rows that are not plain data (`VERDICT_SCHEMA`).
        sketch: lateness bucket -> rows: how far rows are behind the newest before them (see
            `jobs.advise.lateness_sketch`).
    """

    survey: MemberSurvey
    verdicts: pa.Table
    sketch: dict[str, int]


class MemberScanner:
    """Summarises a slice up to and including its first barrier row."""

    def __init__(
        self, spec: PipelineSpec, member: Member, rows: MemberColumns, state: JsonView
    ) -> None:
        # What follows the first barrier row belongs to the next slice.
        stop = np.flatnonzero(rows.kinds == BARRIER)
        self.end = int(stop[0]) + 1 if stop.size else rows.kinds.size
        self.source = spec.sources[member.source]
        self.member = member
        self.rows = rows
        self.limits_adjusted_rows = spec.release.limits_adjusted_rows
        punctuation = self.source.punctuation
        self.on_violation = punctuation.on_violation if punctuation else "error"
        # What the rows of earlier cuts left behind for this member; nothing for a new one.
        known = state.get("members", {}).get(str(member)) or {}
        self.memory: dict[str, int] = dict(known.get("generator") or {})
        self.wall_before = time.wall if (time := read_pipeline_time(state)) else None
        self.kinds = rows.kinds[: self.end]
        self.shift = 1 if self.source.frontier == "inclusive" else 0
        data = np.flatnonzero(self.kinds == DATA)
        jumps = self._find_jumps(data)
        self.jumped = data[jumps]
        self.places = data[~jumps] if jumps.any() else data
        # Most slices have data rows only: their times need no copy.
        every = self.places.size == self.end
        self.times = rows.times[: self.end] if every else rows.times[self.places]
        self.ends = rows.ends[: self.end] if every else rows.ends[self.places]
        first = self.memory.get("newest", TICK_MIN)
        # Empty arrays stay empty, so a slice without data rows needs no case of its own.
        self.newest = np.maximum(np.maximum.accumulate(self.times), first)
        # The newest time before each row, from earlier cuts for the first one.
        self.before = np.concatenate(([first], self.newest))[:-1]

    def scan(self) -> MemberScan:
        """Return the member's survey, its rows that are not plain data, and their lateness.

        Raises:
            PoisonError: punctuation going back under ``regress: error``.
        """
        held, current, regressions = self._resolve_punctuation()
        violated = self.times < held
        moved = violated
        newest_kept = None
        newest_end = TICK_MIN
        if violated.any() or self.limits_adjusted_rows:  # most slices need no copy of their times
            moved = violated & (self.ends > held) & (self.on_violation == "adjust")
            times = np.where(moved, held, self.times)
            newest_kept, newest_end = self._find_newest(times, moved | ~violated)
        behind = np.where(self.before == TICK_MIN, 0, self.before - self.times)
        survey = MemberSurvey(
            member=self.member,
            rows=self.times.size,
            min_time=int(self.times.min()) if self.times.size else None,
            max_time=int(self.times.max()) if self.times.size else None,
            barrier=self._find_barrier(),
            punctuation=None if current == TICK_MIN else current,
            punctuation_state=self._carry_state(current),
            quarantined=self.jumped.size,
            dead=int(np.count_nonzero(self.kinds == DEAD)),
            violations=int(np.count_nonzero(violated)),
            regressions=regressions,
            newest_kept=newest_kept,
            newest_end=newest_end,
        )
        return MemberScan(survey, self._judge_rows(violated, moved, held), _sketch_lateness(behind))

    def _find_jumps(self, data: Any) -> Flags:
        """Rows far ahead of the clock and of their partition's newest.

        Only the former, few, are looked at one by one.
        """
        jump = self.source.max_jump
        found = np.zeros(data.size, dtype=bool)
        if jump is None or self.wall_before is None:
            return found
        times = self.rows.times[data]
        # Without a clock, the first row of a partition would have nothing to be measured by.
        far = times > self.wall_before + jump
        # A jump is measured from the plausible rows before it, never from another jump.
        near = np.maximum.accumulate(np.where(far, TICK_MIN, times))
        newest = self.memory.get("newest")
        for place in np.flatnonzero(far):
            known = int(near[place])
            newest = known if newest is None or known > newest else newest
            if newest == TICK_MIN or times[place] > newest + jump:
                found[place] = True
            else:
                newest = max(newest, int(times[place]))
        return found

    def _resolve_punctuation(self) -> tuple[Ints, int, int]:
        """Return the punctuation for each row and at the end, and how often it regressed."""
        self.events = self.memory.get("events", 0)
        self.base = self.memory.get("base")
        if (
            self.source.punctuation is None
            and "current" not in self.memory
            and not (self.kinds == PUNCTUATION).any()
        ):
            return np.array(TICK_MIN), TICK_MIN, 0  # most sources: one number instead of a column
        ahead, after = self._generate_punctuation()
        regressions = self._merge_explicit_punctuation(ahead, after)
        current = int(
            max(
                self.memory.get("current", TICK_MIN),
                ahead.max(initial=TICK_MIN),
                after.max(initial=TICK_MIN),
            )
        )
        return (
            np.maximum(ahead[self.places], self._accumulate_marks(after)[self.places]),
            current,
            regressions,
        )

    def _generate_punctuation(self) -> tuple[Ints, Ints]:
        """Generated punctuation.

        Per row, what holds from this row on, and from the next one on.
        """
        ahead = np.full(self.end, TICK_MIN, dtype=np.int64)
        after = np.full(self.end, TICK_MIN, dtype=np.int64)
        options = self.source.punctuation
        if options is None or not options.is_generated or not self.times.size:
            return ahead, after
        if options.align == "floor":
            if options.every_span is not None:
                steps = np.minimum(
                    self.times,
                    (self.times - options.delay) // options.every_span * options.every_span,
                )
                ahead[self.places] = np.where(self.times > self.before, steps, TICK_MIN)
            return ahead, after
        for place in self._find_due_rows(options.every_events, options.every_span):
            after[self.places[place]] = saturate_ticks(
                int(self.newest[place]) - options.delay + self.shift
            )
        return ahead, after

    def _find_due_rows(self, every: int | None, span: int | None) -> Iterator[int]:
        """Rows after which punctuation is generated: one step per punctuation, not per row."""
        place = 0
        size = self.times.size
        while place < size:
            self.base = int(self.newest[place]) if self.base is None else self.base
            by_events = size if every is None else place + max(every - self.events, 1) - 1
            by_span = (
                size
                if span is None
                else max(place, int(np.searchsorted(self.newest, self.base + span)))
            )
            due = min(by_events, by_span)
            if due >= size:
                self.events += size - place
                return
            yield due
            self.events = 0
            self.base = int(self.newest[due])
            place = due + 1

    def _merge_explicit_punctuation(self, ahead: Ints, after: Ints) -> int:
        """Explicit punctuation joins the marks; counts those that go back."""
        places = np.flatnonzero(self.kinds == PUNCTUATION)
        # An inclusive frontier promises the time itself as well, so the exclusive one is a tick
        # later.
        stamps = np.minimum(self.rows.times[places], TICK_MAX - self.shift) + self.shift
        after[places] = stamps
        np.maximum.accumulate(ahead, out=ahead)
        before = np.maximum(ahead, self._accumulate_marks(after))[places]
        back = np.flatnonzero(stamps < before)
        if (
            back.size
            and self.source.punctuation is not None
            and self.source.punctuation.regress == "error"
        ):
            first = int(back[0])
            raise PUNCTUATION_REGRESSED(
                member=self.member,
                seq=int(self.rows.seqs[places[first]]),
                before=int(before[first]),
                after=int(stamps[first]),
            )
        return int(back.size)

    def _accumulate_marks(self, after: Ints) -> Ints:
        """Per row, the greatest mark that earlier rows and cuts have set."""
        known = np.concatenate(([self.memory.get("current", TICK_MIN)], after))[:-1]
        return np.maximum.accumulate(known)

    def _find_newest(self, times: Ints, kept: Flags) -> tuple[int | None, int]:
        """Return `newest_kept` and `newest_end` of the survey."""
        newest = int(times.max(initial=TICK_MIN, where=kept))
        return (
            None if newest == self.times.max(initial=TICK_MIN) else newest,
            int(self.ends.max(initial=TICK_MIN, where=kept & self.limits_adjusted_rows)),
        )

    def _judge_rows(self, violated: Flags, moved: Flags, held: Ints) -> pa.Table:
        stays = "cti_violation" if self.on_violation == "error" else "dropped"
        verdicts = np.where(moved[violated], "adjust", stays).tolist()
        marks = np.broadcast_to(held, violated.shape)[violated].tolist()
        jumps = self.jumped.size
        return pa.table(
            [
                self.rows.seqs[np.concatenate((self.jumped, self.places[violated]))],
                ["max_jump"] * jumps + verdicts,
                [None] * jumps + marks,
            ],
            schema=VERDICT_SCHEMA,
        )

    def _find_barrier(self) -> BarrierRow | None:
        if self.rows.barrier is None:
            return None
        place = self.end - 1
        own = int(self.rows.times[place])
        if own == TICK_MIN:  # a barrier row without a time has that of its member
            own = int(self.newest[-1]) if self.times.size else self.memory.get("newest", 0)
        return BarrierRow(int(self.rows.seqs[place]), *self.rows.barrier, own)

    def _carry_state(self, current: int) -> dict[str, int] | None:
        newest = int(self.newest[-1]) if self.times.size else self.memory.get("newest")
        last = int(self.times[-1]) if self.times.size else self.memory.get("last")
        mark = None if current == TICK_MIN else current
        memory = {
            "newest": newest,
            "last": last,  # nothing reads it; manifests keep their bytes
            "current": mark,
            "events": self.events or None,
            "base": self.base,
        }
        # Every manifest carries this, so it holds only what is set.
        return {key: value for key, value in memory.items() if value is not None} or None


def _sketch_lateness(behind: Ints) -> dict[str, int]:
    late = behind[behind > 0]
    # Bucket 0 counts the rows that came in order.
    sketch = {"0": int(behind.size - late.size)} if behind.size else {}
    if late.size:
        buckets, counts = np.unique(
            np.ceil(np.log(late) / log(GAMMA)).astype(np.int64) + 1, return_counts=True
        )
        sketch |= {str(int(b)): int(n) for b, n in zip(buckets, counts, strict=True)}
    return sketch
