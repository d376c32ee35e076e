"""Streams of a lineage against a recomputation that knows no crash, restore or retired epoch.

The recomputation dispatches the sealed events in order, and reads backfills from memory. A merge is
taken as it was sealed: what it must contain is proved elsewhere (`tests/splice`), and here that the
epochs behind it go on from there, and that a request is merged once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from tests.servers.memory_store import MemoryStore
from tests.simulation.basics import PIPELINE, Violation
from tests.simulation.cheap import arrow_of, rows_of

from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout
from tidegate.checkpoints.canonical_json import canonical_bytes
from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult
from tidegate.jobs.engine.manifest_writer import DISPATCHER_KINDS, SPLICE_KIND
from tidegate.jobs.eventtime.decision_types import Decision
from tidegate.jobs.spec.stream_specs import EVENTS_STREAM, REJECTIONS
from tidegate.jobs.streams.dispatcher import StreamDispatcher, make_local_runner
from tidegate.jobs.streams.stream_rows import to_event_rows, to_stream_rows
from tidegate.jobs.streams.stream_state import DispatchState

if TYPE_CHECKING:
    from tests.simulation.actors import Stage


def judge_streams(stage: Stage, lineage: Sequence[Manifest]) -> None:
    """Go through the lineage, if the pipeline has streams.

    Raises:
        Violation: an epoch sent something else to a stream, or a request was merged twice.
    """
    if stage.spec.streams:
        recomputation = _Recomputation(stage)
        for epoch in lineage:
            recomputation.follow(epoch)


class _Scratch(MemoryStore):
    """What the recomputation writes, over what the schedule has ever written."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(name="sim")
        self.world = stage.world
        self.bucket.objects.update(stage.world.bucket.written)


class _Recomputation:
    """The streams up to an epoch.

    Attributes:
        record: state of the streams, as manifests note it.
        segments: state of the reducers and buffers, and what waits for a merge.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage, self._spec = stage, stage.spec
        self._columns = stage.spec.stream_graph.columns
        self._store = _Scratch(stage)
        self._rows: dict[str, pa.Table] = {}
        self._merged: set[str] = set()
        self._dispatcher = StreamDispatcher(stage.spec, make_local_runner(self._store, self))
        self.record: Mapping[str, Any] = {}
        self.segments: tuple[FileRef, ...] = ()
        self._position = 0

    def read_rows(self, stream: str, _: Mapping[str, str], start: int, end: int) -> pa.Table:
        """Rows of earlier epochs, by position (`RowHistory.read_rows`)."""
        return self._rows[stream].slice(start, end - start)

    def read_last_time(self, start: int) -> int | None:
        """The streams are there from the first epoch on."""
        raise AssertionError(start)

    def follow(self, epoch: Manifest) -> None:
        """Go one epoch or merge further."""
        if epoch.is_merge:
            self._adopt_merge(epoch)
        else:
            self._dispatch_again(epoch)
        self._position = epoch.next_position

    def _dispatch_again(self, epoch: Manifest) -> None:
        events = tuple(epoch.files.get(EVENTS_STREAM, ()))
        decision = Decision.from_record(epoch.decision, epoch.decider)
        folders = AttemptFolders(BucketLayout(PIPELINE), epoch.id)
        order = MoveOrder(Cut(()), decision, self.segments, folders, self._position)
        files = {EVENTS_STREAM: events}
        moved = MoveResult(files, (), EpochCounters(), None, epoch.next_position)
        asked = [(verb, name) for verb, name in epoch.stream_state["asked"]]
        done = self._dispatcher.dispatch_rows(order, moved, self.record, asked)
        for table in (*self._spec.streams, REJECTIONS):
            self._compare(epoch, table, done.files.get(table, ()))
        if canonical_bytes(done.record) != canonical_bytes(epoch.stream_state):
            raise Violation(
                f"{epoch.id}: the streams are at {epoch.stream_state}, not {done.record}"
            )
        last = DispatchState.from_record(self.record).stream_state(EVENTS_STREAM).last
        columns, time = self._columns[EVENTS_STREAM], self._spec.event_time_column
        for file in events:
            rows = to_event_rows(self._read(EVENTS_STREAM, file), columns, time, last)
            self._append(EVENTS_STREAM, rows)
        for stream in self._spec.streams:
            for file in done.files.get(stream, ()):
                self._append(
                    stream, to_stream_rows(self._read(stream, file), self._columns[stream])
                )
        self.record, self.segments = done.record, done.segments

    def _adopt_merge(self, epoch: Manifest) -> None:
        merge = next(
            one for one in epoch.segments
            if one.kind == SPLICE_KIND and one.extra["checkpoint"] == str(epoch.id)
        )  # fmt: skip
        request = str(merge.extra["request"])
        if request in self._merged:
            raise Violation(f"{epoch.id} merges {request} a second time")
        self._merged.add(request)
        rewrites: Mapping[str, int] = merge.extra.get("rewrites", {})
        for stream, first in rewrites.items():
            if stream in self._rows:
                self._rows[stream] = self._rows[stream].slice(0, first)
            for file in epoch.files[stream]:
                rows = to_stream_rows(self._read(stream, file), self._columns[stream])
                self._append(stream, rows)
            self._require_order(epoch, stream)
        self.record = epoch.stream_state
        self.segments = tuple(s for s in epoch.segments if s.kind.startswith(DISPATCHER_KINDS))

    def _require_order(self, epoch: Manifest, stream: str) -> None:
        rows = self._rows[stream].to_pylist()
        times, names = [row["stream_time"] for row in rows], Counter(row["_id"] for row in rows)
        contiguous = [row["position"] for row in rows] == list(range(len(rows)))
        if not contiguous or times != sorted(times) or any(n > 1 for n in names.values()):
            raise Violation(f"{epoch.id} leaves {stream} with {rows}")

    def _compare(self, epoch: Manifest, table: str, again: Sequence[FileRef]) -> None:
        written = self._stage.world.bucket.written
        has = Counter(
            _text(row) for file in epoch.files.get(table, ()) for row in rows_of(written[file.key])
        )
        objects = self._store.bucket.objects
        wanted = Counter(_text(row) for file in again for row in rows_of(objects[file.key]))
        if has != wanted:
            lacks, more = wanted - has, has - wanted
            raise Violation(f"{epoch.id}: {table} lacks {lacks or ''} and has {more or ''}")

    def _read(self, table: str, file: FileRef) -> pa.Table:
        return arrow_of(self._spec, table, self._store.bucket.objects[file.key])

    def _append(self, stream: str, rows: pa.Table) -> None:
        known = self._rows.get(stream)
        self._rows[stream] = rows if known is None else pa.concat_tables([known, rows])


def _text(row: Mapping[str, Any]) -> str:
    return repr(sorted(row.items()))
