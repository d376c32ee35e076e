"""What an epoch of dispatching leaves: tables of streams, and state for the next epoch.

The state of streams and attachments is ``notes["streams"]`` of the manifest. Reducer states are
segments: each epoch appends the keys it changed, and a reducer's small segments are merged into one
from time to time.

The document of a splice request is written once the request is sealed complete. Writing it again
changes nothing. The rows are in the manifest: if a driver dies before it writes the document, the
next one does.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from tidegate.checkpoints.bucket_layout import AttemptFolders, CheckpointId
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.splice_requests import SpliceRequest, create_splice_request
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.arrow_tables import (
    TimeBounds,
    describe_parquet_object,
    encode_parquet,
    read_columns,
)
from tidegate.jobs.engine.file_footers import FileFooter
from tidegate.jobs.engine.interfaces import TableFiles
from tidegate.jobs.spec.stream_specs import StreamGraph
from tidegate.json_types import JsonObject, JsonView

from .reducers import (
    STATE_SCHEMA,
    FoldFailure,
    ReducerStates,
    build_states_table,
    parse_states_table,
)
from .stream_rows import compute_time_bounds, select_request_segments


@dataclass(frozen=True, slots=True)
class StreamState:
    """The end of a stream.

    Attributes:
        next: position of the next row.
        last: stream time of the newest row, in ticks: no later row may be below; None before the
            first row.
        shift: of `events`: rows that merges inserted into the stream; the pipeline's positions do
            not count them.
    """

    next: int = 0
    last: int | None = None
    shift: int = 0


@dataclass(frozen=True, slots=True)
class AttachmentState:
    """The state of one pipe or reducer.

    Attributes:
        cursor: position of the next row of the origin.
        head: the origin's end when it was attached; rows below are its backfill.
        since: ``<timeline>-<slot>`` of that epoch.
        round: how many times it was attached; later rounds dispatch under a name with the number.
        status: only an attached one takes rows; a failure pauses it.
        failure: the row that paused it: position, id and error; None unless it is paused.
        caught_up: (from, to, slot) of rows that it took in a later epoch than the one they came in:
            its backfill, and what it made up for after a pause. It took all others as they came.
        until: slot that detached it; None if none did.
    """

    cursor: int = 0
    head: int = 0
    since: str = ""
    round: int = 1
    status: Literal["attached", "paused", "detached"] = "attached"
    failure: JsonObject | None = None
    caught_up: tuple[tuple[int, int, int], ...] = ()
    until: int | None = None

    def dispatch_name(self, name: str) -> str:
        """Return its name in the identities of what it dispatches."""
        return name if self.round == 1 else f"{name}@{self.round}"

    def request_id(self, name: str) -> str:
        """Return the id of its splice request."""
        return f"{name}-{self.since}"


@dataclass(frozen=True)
class CollectedRequest:
    """A splice request while its rows are being collected.

    People can decide about it once it is not `open` any more. `min_time` and `max_time` are stamps
    of its rows in ticks, None without rows; `merged` is the slot that merged it.
    """

    attachment: str
    destination: str
    rows: int = 0
    min_time: int | None = None
    max_time: int | None = None
    open: bool = True
    merged: int | None = None


@dataclass(frozen=True)
class DispatchState:
    """The state of all streams, attachments and requests."""

    streams: dict[str, StreamState] = field(default_factory=dict)
    attachments: dict[str, AttachmentState] = field(default_factory=dict)
    requests: dict[str, CollectedRequest] = field(default_factory=dict)

    @classmethod
    def from_record(cls, record: JsonView) -> DispatchState:
        """Read the state from a manifest; empty if the manifest has no streams."""
        return _STATES.validate_python(record)

    def to_record(self, graph: StreamGraph, asked: Iterable[tuple[str, str]] = ()) -> JsonObject:
        """Return the state as a manifest stores it, and what users asked for in its epoch.

        Its `lagging` means that an attachment has rows to take even if no new ones come: a driver
        without new rows seals an epoch for these.
        """
        lagging = any(
            state.status == "attached" and state.cursor < self.stream_state(spec.origin).next
            for name, spec in graph.attachments.items()
            if (state := self.attachments.get(name))
        )
        # The field names are the manifest's: they must not be renamed.
        return {**asdict(self), "lagging": lagging, "asked": [list(request) for request in asked]}

    def stream_state(self, name: str) -> StreamState:
        """Return the end of a stream; that of an empty one if it is not known."""
        return self.streams.get(name, StreamState())

    def attach(self, name: str, head: int, since: str) -> None:
        """Start at the origin's first row, in a new round if there was one.

        Rows below `head` are backfill.
        """
        # A later round dispatches under another name: its rows must not have the identities of the
        # first round.
        before = self.attachments.get(name)
        self.attachments[name] = AttachmentState(0, head, since, before.round + 1 if before else 1)

    def complete_request(self, name: str) -> None:
        """Close the splice request of an attachment whose backfill is over or that was detached."""
        attachment = self.attachments[name]
        request = self.requests.get(attachment.request_id(name))
        complete = attachment.cursor >= attachment.head or attachment.status == "detached"
        if request is not None and request.open and complete:
            self.requests[attachment.request_id(name)] = replace(request, open=False)

    def copy(self) -> DispatchState:
        """Return a state that can change without this one."""
        return DispatchState({**self.streams}, {**self.attachments}, {**self.requests})

    def pause(self, name: str, failure: FoldFailure) -> None:
        """Pause an attachment at the row that stopped it."""
        cause = {"position": failure.position, "id": failure.row_id, "error": failure.error}
        self.update_attachment(name, status="paused", failure=cause)

    def update_attachment(self, name: str, **fields: Any) -> None:
        """Change fields of an attachment's state."""
        self.attachments[name] = replace(self.attachments[name], **fields)


_STATES = TypeAdapter(DispatchState)


def parse_since_slot(since: str) -> int:
    """Return the slot of `since`, which is ``<timeline>-<slot>``; 0 if it is empty."""
    return int(since.partition("-")[2] or 0)


@dataclass
class DispatchFiles:
    """The files of an epoch's or a merge's attempt, and the live segments as they change.

    They are in the store only after `flush`.

    Attributes:
        segments: the live ones, with those of this attempt.
        suffix: ends the names of the files.
        tables: table -> references of the files of this attempt.
        footers: key of a file of a table -> its footer.
    """

    _store: Store
    _folders: AttemptFolders
    segments: list[FileRef]
    suffix: str = ""
    tables: TableFiles = field(default_factory=dict)
    footers: dict[str, FileFooter] = field(default_factory=dict)
    _unwritten: dict[str, bytes] = field(default_factory=dict)

    def live_segments(self, kind: str) -> list[FileRef]:
        """Return the live segments of a kind."""
        return [ref for ref in self.segments if ref.kind == kind]

    def drop_segments(self, kind: str) -> None:
        """Drop all segments of a kind from the live ones."""
        self.segments = [ref for ref in self.segments if ref.kind != kind]

    def write_table(self, name: str, rows: Any, time: str | None, file: str = "part-0") -> None:
        """Take this epoch's rows of a table; a second call for the table replaces the first.

        `time` is the column whose minimum and maximum go into the file's reference.
        """
        stem = f"{self._folders.table_prefix(name)}{file}"
        bounds = compute_time_bounds(rows[time]) if time else (None, None)
        ref = self._take_file(stem, rows, f"table:{name}", bounds, None)
        self.tables[name] = (ref,)
        footer = pq.read_metadata(io.BytesIO(self._unwritten[ref.key]))
        self.footers[ref.key] = FileFooter.pack(footer, ref.bytes)

    def write_segment(
        self,
        kind: str,
        rows: Any,
        low: int | None = None,
        high: int | None = None,
        extra: JsonView | None = None,
    ) -> None:
        """Take a state segment; once per kind, because the kind and the attempt make its key.

        `low` and `high` are the least and greatest stamp, and `extra` goes into the reference.
        """
        stem = self._folders.segment_stem(kind)
        self.segments.append(self._take_file(stem, rows, kind, (low, high), extra))

    def flush(self) -> None:
        """Write the files."""
        for key, data in self._unwritten.items():
            self._store.put(key, data)
        self._unwritten.clear()

    def _take_file(
        self, stem: str, rows: Any, kind: str, bounds: TimeBounds, extra: JsonView | None
    ) -> FileRef:
        key, data = f"{stem}{self.suffix}.parquet", encode_parquet(rows)
        self._unwritten[key] = data
        return describe_parquet_object(key, data, kind, bounds, extra)


def add_attempt_columns(rows: Any, attempt: CheckpointId) -> Any:
    """Return rows of a table with the columns that name the attempt that writes them."""
    count = rows.num_rows
    rows = rows.append_column("_timeline", pa.array([attempt.timeline] * count, pa.int32()))
    return rows.append_column("_epoch", pa.repeat(attempt.slot, count))


# Segments of one reducer: more than this are gathered, so that a restart reads a bounded number of
# files.
_MAX_SEGMENTS = 4


@dataclass
class ReducerStateStore:
    """Reads reducer states, and caches them by the immutable segments they came from."""

    _store: Store
    _known: dict[str, tuple[tuple[str, ...], ReducerStates]] = field(default_factory=dict)

    def load(self, files: DispatchFiles, name: str) -> ReducerStates:
        """Return all states of a reducer from its live segments; those of later ones win.

        The dictionary is the cache itself: callers must not change it.
        """
        segments = files.live_segments(f"reducer:{name}")
        keys = tuple(ref.key for ref in segments)
        known = self._known.get(name)
        if known is None or known[0] != keys:
            known = self._known[name] = (keys, read_reducer_states(self._store, segments))
        return known[1]

    def save(
        self, files: DispatchFiles, name: str, before: ReducerStates, changed: ReducerStates
    ) -> None:
        """Write the states that a batch changed; nothing if it changed none.

        If the reducer has four segments or more, one with all states replaces them. `before` is not
        changed, because the epoch may not be sealed.
        """
        if not changed:
            return
        kind, after = f"reducer:{name}", {**before, **changed}
        # Each epoch adds a small segment; rewriting all states every time would cost more than
        # reading a few files at a restart.
        gather = len(files.live_segments(kind)) >= _MAX_SEGMENTS
        if gather:
            files.drop_segments(kind)
        files.write_segment(kind, build_states_table(after if gather else changed))
        self._known[name] = (tuple(ref.key for ref in files.live_segments(kind)), after)


def read_reducer_states(store: Store, segments: list[FileRef]) -> ReducerStates:
    """Return the states in some segments; those of later segments win."""
    return parse_states_table(read_columns(store, segments, STATE_SCHEMA))


@dataclass
class SpliceRequestSink:
    """A follower of the log that writes the documents of complete requests.

    Existing documents are not changed. Requests without rows get none.
    """

    name = "splice requests"
    _clock: Clock = SYSTEM_CLOCK
    _offered: set[str] = field(default_factory=set)

    def follow(self, log: SlotLog, *, flush: bool = True) -> int:
        """Write the requests of the newest epoch, which holds all those of earlier ones.

        Returns:
            1, or 0 if no epoch was sealed yet.
        """
        epoch = log.head().record
        if epoch is None:
            return 0
        for name, request in DispatchState.from_record(epoch.stream_state).requests.items():
            # A document is offered once per process. After a restart it is written again, which
            # changes nothing. An open request may still get rows; one without rows needs no
            # decision.
            if name not in self._offered and request.rows and not request.open:
                create_splice_request(log.store, self._make_document(epoch, name, request))
                self._offered.add(name)
        return 1

    def _make_document(
        self, epoch: Manifest, name: str, request: CollectedRequest
    ) -> SpliceRequest:
        files = select_request_segments(epoch.segments, request.attachment, name)
        return SpliceRequest(
            id=name,
            pipeline=epoch.pipeline,
            destination=request.destination,
            origin="attachment",
            origin_detail={"attachment": request.attachment},
            rows=[file.model_dump(mode="json") for file in files],
            row_count=request.rows,
            min_time=request.min_time,
            max_time=request.max_time,
            created_at=self._clock.wall_ticks(),
            who=request.attachment,
            why=f"the backfill of {request.attachment}",
            at_slot={"timeline": epoch.timeline, "slot": epoch.slot},
        )

    def lag(self, log: SlotLog) -> int:
        """Return 0: the newest epoch holds the requests of all earlier ones.

        While `follow` fails, the publisher still counts this follower as behind.
        """
        return 0
