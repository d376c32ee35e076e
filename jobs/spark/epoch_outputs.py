"""What the parts of a move have written, joined into the result and the counters of the epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import partial

import pyarrow as pa

from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.checkpoints.row_counts import (
    LATE_ROWS,
    TARDY,
    name_late_counts,
)
from tidegate.jobs.engine.file_footers import note_footers
from tidegate.jobs.engine.interfaces import MoveResult
from tidegate.jobs.rows.built_events import BuildOrder, EventGroup, write_built_events
from tidegate.jobs.rows.late_rows import CountedRows, LateCounts, SourceCounts
from tidegate.jobs.rows.state_files import MergedState
from tidegate.jobs.spec.pipeline import BUILT, DEAD_LETTERS, EVENTS, LATE
from tidegate.jobs.spec.row_rules import FILTERED, RULE_QUARANTINED

from .epoch_context import EpochContext
from .python_tasks import log_files
from .task_epochs import TaskScans
from .task_events import ReleasedRows, count_buffered_rows
from .task_runner import choose_runner

# Counts of an epoch that are sums over its sources.
_TOTALS = ("read", "released", "late", "rejected", "dead_lettered", RULE_QUARANTINED, FILTERED)


@dataclass(frozen=True)
class EpochOutputs:
    """The outputs of one epoch.

    Attributes:
        scans: what the survey found.
        released: the events that left, and the order buffer.
        late: rows of the late table.
        dead: rows of the dead-letter table, and rows that break rules.
        edges: open edge events.
        windows: window -> its results and state.
    """

    scans: TaskScans
    released: ReleasedRows
    late: CountedRows
    dead: CountedRows
    edges: MergedState
    windows: dict[str, MergedState]

    def to_result(self, epoch: EpochContext) -> MoveResult:
        """Build the events that `glom` asks for and return the result of the move."""
        released = self.released
        built = build_events(epoch, released)
        stateful = (released, built, self.edges, *self.windows.values())
        tables = {
            EVENTS: released.results,
            BUILT: built.results,
            LATE: self.late.written,
            DEAD_LETTERS: self.dead.written,
            **{name: window.results for name, window in self.windows.items()},
        }
        # Segments that the epoch took over are not counted: they cost it no write.
        states = [output.written for output in stateful]
        segments = tuple(ref for output in stateful for ref in output.segments)
        # Counted from the segments and not from the rows moved: the balance of the counters checks
        # one against the other.
        decision = epoch.decision
        waited = {key: rows for key, (rows, _) in released.waiting.items()}
        waits = {key: rows for key, (_, rows) in released.waiting.items()}
        before = count_buffered_rows(epoch.order.segments, decision.release_before, waited)
        after = count_buffered_rows(segments, decision.release_after, waits)
        return MoveResult(
            files={name: written for name, written in tables.items() if written},
            segments=segments,
            counters=self.counters(before, after, decision.flagged),
            released_max=released.maximum,
            next_position=epoch.order.next_position + released.rows,
            sketches=self.scans.sketches,
            bytes_written=sum(ref.bytes for own in (*tables.values(), *states) for ref in own),
        )

    def counters(
        self, buffered_before: int, buffered_after: int, flagged: Collection[str] = ()
    ) -> EpochCounters:
        """Count each row by what became of it.

        Args:
            buffered_before: rows in the order buffer before the epoch.
            buffered_after: rows in it after the epoch.
            flagged: members whose rows of this epoch stood in front of a tardy barrier.
        """
        rows = SourceCounts()
        late = self.late.late + self.dead.late
        self._count_surveyed(rows, late, flagged)
        for counted in (self.released.counts, self.dead.counts, self.late.counts):
            rows.update(counted)
        dropped = Counter[str]()
        late_by_output = Counter[str]()
        for (source, output, reason, is_dropped), missed in late.items():
            for name in name_late_counts(output, reason, dropped=is_dropped):
                rows[source, name] += missed
            if is_dropped and output == EVENTS:
                dropped[reason] += missed
            else:
                late_by_output[output] += missed
        per_source = dict[str, dict[str, int]]()
        totals = Counter[str]()
        for (source, name), number in sorted(rows.items()):
            if number:  # zeros stay out of the manifest; a count below zero is shown as it is
                per_source.setdefault(source, {})[name] = number
                totals[name] += number
        results = Counter[str]()
        overflowed = Counter[str]()
        for name, window in self.windows.items():
            results[name] = sum(ref.rows for ref in window.results)
            overflowed[name] = window.overflowed
        return EpochCounters(
            **{name: totals[name] for name in _TOTALS},
            retained_before=buffered_before,
            retained=buffered_after,
            dropped=dict(+dropped),
            late_by_output=dict(+late_by_output),
            windows=dict(+results),
            overflowed=dict(+overflowed),
            per_source=per_source,
        )

    def _count_surveyed(
        self, rows: SourceCounts, late: LateCounts, flagged: Collection[str]
    ) -> None:
        verdicts = self.scans.count_verdicts()
        for index, member in enumerate(self.scans.survey.members):
            source = member.member.source
            rows[source, "read"] += member.rows + member.quarantined + member.dead
            dropped = verdicts[index, "dropped"]
            late[source, EVENTS, "cti_violation", True] += dropped
            rows[source, LATE_ROWS] += dropped
            if str(member.member) in flagged:
                aside = dropped + verdicts[index, "cti_violation"]
                rows[source, TARDY] += member.rows - aside


GLOM_KIND = "glom"


def build_events(epoch: EpochContext, released: ReleasedRows) -> MergedState:
    """Group what this epoch released in order; late rows, which leave at once, are in no group.

    Without ``release.glom`` nothing is written, and no state stays.
    """
    options = epoch.spec.release.glom
    before = epoch.live_segments(GLOM_KIND)
    if options is None:
        return MergedState()
    group = EventGroup()
    if before:
        (known,) = epoch.files.read_segment(before[0]).to_pylist()
        group = EventGroup(**known)
    order = BuildOrder(
        options,
        epoch.spec.event_time_column,
        epoch.order.folders,
        epoch.store.url,
        released.results,
        epoch.order.next_position,
        released.flagged,
        group,
        epoch.decision.release_after,
    )
    if order.events:
        runner = choose_runner(epoch.session)
        (answer,) = runner.run_small_job(epoch.session, partial(map, write_built_events), [order])
        log_files("built", order.folders, [answer])
    else:  # without events at most one group ends, and no row is read
        answer = write_built_events(order)
    if answer.error is not None:
        raise answer.error
    note_footers(epoch.store, answer.footers)
    if answer.group == group and before:
        return MergedState(segments=tuple(before))
    group_row = pa.Table.from_pylist([asdict(answer.group)])
    state = epoch.files.write_segment(GLOM_KIND, group_row, None, {})
    return MergedState(answer.files, state, state)
