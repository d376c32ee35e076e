"""What the checks of a pipeline look at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.row_counts import RowCounts
from tidegate.jobs.spec.pipeline import PipelineSpec

ORIGIN = ("_source", "_partition", "_seq")
"""The columns that name a row of most tables."""
LATE_COLUMNS = ("output", "reason", "lateness_us", *ORIGIN, "_epoch")
"""The columns of the late table that the checks need."""


def event_columns(spec: PipelineSpec) -> tuple[str, ...]:
    """Return the columns of the events table that the checks need; no other table is large."""
    event_time = spec.event_time_column
    return ("position", "section", "_late", *ORIGIN, "_epoch", event_time)


@dataclass(frozen=True)
class Evidence:
    """What the checks look at: one consistent cut through the tables, and two manifests.

    Attributes:
        late: the late table up to the epoch of `head`; the other tables likewise. Late rows and
            events may have only the columns that the checks need.
        rejections: rows that streams rejected; None for a pipeline without streams.
        head: manifest of the newest epoch that the tables show; None before the first.
        recent_since: epochs after this one are recent.
        past: manifest of that epoch; None if recent epochs begin with the log.
        tables: recent rows of the tables that suites of the user look at, with all columns.
        manifests: of recent epochs, oldest first; retired ones are missing, and of very many
            recent epochs the older ones.
        sealed: slot of the newest sealed epoch or merge, published or not.
        now: ticks.
        events_since: the events table was read from the epoch after this one.
        wanted: the stream runs or should run, and rows waited when `head` was sealed, so an old
            `head` is a problem.
        verified: verdict on the objects that `head` needs, by presence and size; ``none`` before
            the first.
        tables_behind: the tables do not show the current timeline yet, so that nothing was judged.
        is_older: it is about a slice before the newest epochs.
        totals: running counters over the lineage up to epoch `totals_upto`.
        view_since: the tables were read from the epoch after this one.
    """

    spec: PipelineSpec
    late: pa.Table
    barriers: pa.Table
    checkpoints: pa.Table
    dead_letters: pa.Table
    events: pa.Table
    events_since: int
    head: Manifest | None
    past: Manifest | None
    sealed: int
    now: int
    wanted: bool
    verified: str
    recent_since: int = 0
    rejections: pa.Table | None = None
    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    manifests: Sequence[Manifest] = ()
    tables_behind: bool = False
    is_older: bool = False
    totals: Mapping[str, int] = field(default_factory=dict)
    totals_upto: int = 0
    view_since: int = 0

    def count_rows(self) -> tuple[defaultdict[str, RowCounts], defaultdict[str, RowCounts]]:
        """Count the rows of each source that `head` has: of all epochs, and of recent ones."""
        now, before = _count_by_source(self.head), _count_by_source(self.past)
        recent = {source: own.since(before[source]) for source, own in now.items()}
        return now, defaultdict(lambda: RowCounts({}), recent)

    def count_all_sources(self) -> tuple[RowCounts, RowCounts]:
        """Count the rows of the pipeline: of all epochs, and of recent ones."""
        now, recent = self.count_rows()
        return RowCounts.add_up(now.values()), RowCounts.add_up(recent.values())

    def select_recent(self, table: pa.Table) -> pa.Table:
        """Return the rows of a table that recent epochs wrote."""
        return table.filter(pc.greater(table["_epoch"], self.recent_since))

    def cut_slice(self, manifests: Mapping[int, Manifest], since: int, last: int) -> Evidence:
        """Return the evidence about an older slice: the epochs after `since` up to `last`.

        Args:
            manifests: number of an epoch -> its manifest; has `last`, and `since` unless it is 0.
            since: the slice begins after this epoch.
            last: its last epoch.
        """

        def cut(table: pa.Table, first: int = self.view_since) -> pa.Table:
            epoch = table["_epoch"]
            return table.filter(pc.and_(pc.greater(epoch, first), pc.less_equal(epoch, last)))

        return replace(
            self,
            late=cut(self.late),
            barriers=cut(self.barriers),
            checkpoints=cut(self.checkpoints),
            dead_letters=cut(self.dead_letters),
            rejections=None if self.rejections is None else cut(self.rejections),
            events=cut(self.events, since),
            events_since=since,
            tables={name: cut(table, since) for name, table in self.tables.items()},
            head=manifests[last],
            past=manifests.get(since),
            recent_since=since,
            manifests=[manifests[n] for n in range(since + 1, last + 1) if n in manifests],
            is_older=True,
            # These are about the newest checkpoint alone.
            sealed=last,
            wanted=False,
            verified="unknown",
        )


def _count_by_source(manifest: Manifest | None) -> defaultdict[str, RowCounts]:
    per_source = manifest.counters.per_source if manifest else {}
    counted = {source: RowCounts.of_source(counts) for source, counts in per_source.items()}
    return defaultdict(lambda: RowCounts({}), counted)
