"""What the parts of a move have written, joined into the result and the counters of the epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.row_counts import (
    LATE_ROWS,
    RULE,
    RULE_WARNED,
    TARDY,
    name_broken_rule,
    name_late_counts,
)
from tidegate.jobs.engine.interfaces import MoveResult
from tidegate.jobs.engine.resume_state import ORDER_KIND
from tidegate.jobs.spark.cut_survey import MemberScans
from tidegate.jobs.spark.edge_events import EpochEdges
from tidegate.jobs.spark.epoch_context import EpochContext, WindowOutput
from tidegate.jobs.spark.event_building import build_events
from tidegate.jobs.spark.late_and_dead_rows import DeadRows, LateRows
from tidegate.jobs.spark.ordered_release import ReleasedRows, count_buffered_rows
from tidegate.jobs.spec.pipeline import BUILT, DEAD_LETTERS, EVENTS, LATE, PipelineSpec
from tidegate.jobs.spec.row_rules import RULE_QUARANTINED


@dataclass(frozen=True, slots=True)
class EpochOutputs:
    """The outputs of one epoch.

    Attributes:
        spec: the pipeline.
        scans: what the survey found.
        released: the events that left, and the order buffer.
        late: rows of the late table.
        dead: rows of the dead-letter table, and rows that break rules.
        edges: open edge events.
        windows: window -> its results and state.
    """

    spec: PipelineSpec
    scans: MemberScans
    released: ReleasedRows
    late: LateRows
    dead: DeadRows
    edges: EpochEdges
    windows: dict[str, WindowOutput]

    def to_result(self, epoch: EpochContext) -> MoveResult:
        """Build the events that `glom` asks for and return the result of the move."""
        released, windows = self.released, self.windows.values()
        built = build_events(epoch, released)
        tables = {
            EVENTS: released.events,
            BUILT: built.built,
            LATE: self.late.written,
            DEAD_LETTERS: self.dead.written,
            **{name: window.results for name, window in self.windows.items()},
        }
        # Segments that the epoch took over are not counted: they cost it no write.
        states = [released.written, built.state, self.edges.written, *(w.written for w in windows)]
        segments = (
            *released.segments,
            *built.segments,
            *self.edges.segments,
            *(ref for window in windows for ref in window.segments),
        )
        # Counted from the segments and not from the rows moved: the balance of the counters checks
        # one against the other.
        buffered = _count_buffered_rows(epoch, segments)
        return MoveResult(
            files={name: written.refs for name, written in tables.items() if written.refs},
            segments=segments,
            counters=self.counters(*buffered, epoch.order.decision.flagged),
            released_max=released.maximum,
            next_position=epoch.order.next_position + released.rows,
            buffered_rows=buffered[1],
            sketches=self.scans.sketches,
            bytes_written=sum(written.bytes for written in (*tables.values(), *states)),
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
        tally = _Tally()
        self._count_surveyed(tally, flagged)
        for source, rows in self.released.per_source.items():
            tally.add(source, "released", rows)
        self._count_dead(tally)
        for (source, output), pairs in self.late.expired.items():
            tally.add(source, f"expired:{output}", pairs)
        self._count_late(tally)
        results = {name: window.results.rows for name, window in self.windows.items()}
        return EpochCounters(
            read=tally.total("read"),
            released=tally.total("released"),
            late=tally.total("late"),
            rejected=tally.total("rejected"),
            dead_lettered=tally.total("dead_lettered"),
            rule_quarantined=tally.total(RULE_QUARANTINED),
            retained_before=buffered_before,
            retained=buffered_after,
            dropped=dict(tally.dropped),
            late_by_output=dict(tally.late_by_output),
            windows={name: rows for name, rows in results.items() if rows},
            per_source={name: dict(rows) for name, rows in sorted(tally.per_source.items())},
        )

    def _count_surveyed(self, tally: _Tally, flagged: Collection[str]) -> None:
        for index, member in enumerate(self.scans.survey.members):
            source = member.member.source
            tally.add(source, "read", member.rows + member.quarantined + member.dead)
            verdicts = Counter(verdict.what for verdict in self.scans.verdicts.get(index, ()))
            tally.add_late(source, EVENTS, "cti_violation", True, verdicts["dropped"])
            tally.add(source, LATE_ROWS, verdicts["dropped"])
            if str(member.member) in flagged:
                aside = verdicts["dropped"] + verdicts["cti_violation"]
                tally.add(source, TARDY, member.rows - aside)

    def _count_dead(self, tally: _Tally) -> None:
        for source, counts in self.dead.counts.items():
            for name, rows in counts.items():
                tally.add(source, name, rows)
        for (source, rule), rows in self.dead.broken.items():
            tally.add(source, name_broken_rule(rule), rows)
            if self.spec.sources[source].rules[rule].severity == "drop":
                tally.add_late(source, EVENTS, RULE, True, rows)
        for (source, rules), rows in self.dead.warned.items():
            tally.add(source, RULE_WARNED, rows)
            for rule in rules:
                tally.add(source, name_broken_rule(rule), rows)

    def _count_late(self, tally: _Tally) -> None:
        for (source, output, reason, dropped), rows in self.late.counts.items():
            tally.add_late(source, output, reason, dropped, rows)
            if not (dropped and output == EVENTS):
                tally.late_by_output[output] += rows
        for source, rows in self.late.rows.items():
            tally.add(source, LATE_ROWS, rows)


@dataclass(slots=True)
class _Tally:
    """Rows by source and disposition."""

    per_source: dict[str, Counter[str]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    late_by_output: Counter[str] = field(default_factory=Counter)

    def add(self, source: str, disposition: str, rows: int) -> None:
        # Zeros stay out of the manifest.
        if rows:
            self.per_source.setdefault(source, Counter())[disposition] += rows

    def add_late(self, source: str, output: str, reason: str, dropped: bool, rows: int) -> None:
        for name in name_late_counts(output, reason, dropped=dropped):
            self.add(source, name, rows)
        if dropped and output == EVENTS and rows:
            self.dropped[reason] += rows

    def total(self, disposition: str) -> int:
        return sum(counts[disposition] for counts in self.per_source.values())


def _count_buffered_rows(epoch: EpochContext, segments: tuple[FileRef, ...]) -> tuple[int, int]:
    """Rows in the order buffer before and after the epoch."""
    decision = epoch.order.decision
    live = [ref for ref in segments if ref.kind == ORDER_KIND]
    return (
        count_buffered_rows(epoch, epoch.live_segments(ORDER_KIND), decision.release_before),
        count_buffered_rows(epoch, live, decision.release_after),
    )
