"""The reference model of streams: everything in memory, event by event, splice merges included.

What a stream holds follows from what arrived at it (`stream_placement`). An attachment is a fold
over its origin by position. So a merge is an insertion followed by the same computation again, from
the first row that moved: folds keep their state before every row, and nothing before it is run again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.oracle.stream_placement import (
    Arrival,
    Rejection,
    RowOrigin,
    StreamRow,
    place_arrivals,
)
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.streams.stream_rows import Event
from tidegate.time_units import TICK_MAX, TICK_MIN

Fold = Callable[
    [Any, Event, int], tuple[Any, Iterable[Mapping[str, Any] | tuple[str, Mapping[str, Any]]]]
]
Value = Mapping[str, Any]


class MergeMode(StrEnum):
    """What an attachment does with the rows that were there before it."""

    CONCAT = "concat"  # appends them
    # Collects them in one request, which the owner of the destination merges or rejects.
    SPLICE = "splice"


class DispatchPhase(StrEnum):
    """Whether a row of the origin was there before the attachment."""

    BACKFILL = "backfill"  # the row was there when the attachment was made
    HEAD = "head"  # it came later


def inherits_stamp(inherit: bool, merge: MergeMode, phase: DispatchPhase) -> bool:
    """Return whether a dispatched row carries its parent's stamp, not one of its destination.

    | inherit | merge  | backfill    | head        |
    |---------|--------|-------------|-------------|
    | yes     | concat | destination | parent      |
    | yes     | splice | parent      | parent      |
    | no      | concat | destination | destination |
    | no      | splice | parent      | destination |
    """
    return inherit if phase is DispatchPhase.HEAD else merge is MergeMode.SPLICE


def is_collected(merge: MergeMode, phase: DispatchPhase) -> bool:
    """Return whether a dispatched row goes into a splice request instead of the destination."""
    return merge is MergeMode.SPLICE and phase is DispatchPhase.BACKFILL


@dataclass(frozen=True, slots=True)
class Attachment:
    """A pipe or a reducer.

    Attributes:
        to: destinations; a dispatch without a name goes to the first.
        fold: (state, event, index) -> state, dispatches. The index counts the events of the stream,
            or of the key.
        key: state is kept per key; None: one state for the stream.
    """

    name: str
    origin: str
    to: tuple[str, ...]
    fold: Fold
    initial: Any = None
    inherit: bool = False
    merge: MergeMode = MergeMode.CONCAT
    key: Callable[[Value], Hashable] | None = None


def pipe(
    name: str,
    origin: str,
    to: str,
    *,
    positions: tuple[int, int] = (0, TICK_MAX),
    times: tuple[int, int] = (TICK_MIN, TICK_MAX),
    where: Callable[[Value], bool] = lambda _value: True,
    inherit: bool = False,
    merge: MergeMode = MergeMode.CONCAT,
) -> Attachment:
    """An attachment that copies selected rows. Ranges are half-open."""

    def fold(state: Any, event: Event, index: int) -> tuple[Any, list[Value]]:
        chosen = (
            positions[0] <= index < positions[1]
            and times[0] <= event.time < times[1]
            and where(event.value)
        )
        return state, [event.value] if chosen else []

    return Attachment(name, origin, (to,), fold, inherit=inherit, merge=merge)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attachment is paused, and at which row of its origin it will go on."""

    row_id: str
    error: str


@dataclass(slots=True)
class Request:
    """A splice request: rows that wait for the owner of the destination."""

    id: str
    destination: str
    rows: list[Arrival]
    attachment: str | None = None
    state: str = "created"


@dataclass(slots=True)
class _Stream:
    outside: list[Arrival] = field(default_factory=list)
    merges: list[tuple[int, str]] = field(default_factory=list)  # (turn, request)
    rows: list[StreamRow] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    buffered: bool = False
    marks: list[tuple[int, int]] = field(
        default_factory=list
    )  # buffered: (turn, rows below this leave)


@dataclass(slots=True)
class _Attached:
    spec: Attachment
    rank: int
    since: int
    until: int | None = None
    failure: Failure | None = None
    gaps: list[tuple[str, int]] = field(
        default_factory=list
    )  # (row it was paused at, turn of going on)
    states: list[dict[Hashable, tuple[Any, int]]] = field(
        default_factory=lambda: [{}]
    )  # before each row: key -> state, index
    sent: list[list[tuple[str, DispatchPhase, Arrival]]] = field(
        default_factory=list
    )  # per row: (destination, phase, dispatch)

    def dispatches(self, destination: str, *, request: bool = False) -> Iterator[Arrival]:
        """What was sent there; with `request` what was collected instead."""
        for batch in self.sent:
            for to, phase, arrival in batch:
                if to == destination and is_collected(self.spec.merge, phase) == request:
                    yield arrival


class World:
    """Streams, attachments and splice requests, and a clock that the caller sets.

    Every call is one turn.

    Args:
        tick: how far the clock moves with every row that a stream takes in one turn.
    """

    def __init__(self, tick: int = 0) -> None:
        self._tick = tick
        self._streams: dict[str, _Stream] = {}
        self._attached: dict[str, _Attached] = {}
        self.requests: dict[str, Request] = {}
        self._turn = 0
        self._clock: list[int] = [TICK_MIN]

    # what people see

    def rows(self, stream: str) -> list[StreamRow]:
        """The stream as it is now."""
        return list(self._streams[stream].rows)

    def times(self, stream: str) -> list[int]:
        """Its stream times."""
        return [row.time for row in self._streams[stream].rows]

    def rejections(self, origin: str) -> list[Rejection]:
        """The log of a stream: its rows' dispatches that a destination refused."""
        return [
            found
            for stream in self._streams.values()
            for found in stream.rejections
            if found.stream == origin
        ]

    def states(self, name: str) -> list[dict[Hashable, Any]]:
        """A reducer's state (key -> state.

        One key None if it has none) before every row it has seen, and after the last.
        """
        return [
            {key: state for key, (state, _) in known.items()}
            for known in self._attached[name].states
        ]

    def failure(self, name: str) -> Failure | None:
        """Why an attachment is paused."""
        return self._attached[name].failure

    # what people do

    def stream(self, name: str, *, buffered: bool = False) -> None:
        """Make a stream.

        `buffered` puts an ordered stage in front of it, which holds rows until `advance` passes
        them.
        """
        self._streams[name] = _Stream(buffered=buffered)

    def append(
        self,
        stream: str,
        *values: Value | tuple[Value, int | None],
        now: int | None = None,
        ids: Sequence[str] = (),
        frontier: int | None = None,
    ) -> None:
        """Append rows from outside in one turn; a pair carries a stamp.

        With a frontier, buffers let go in the same turn.
        """
        turn = self._begin(now)
        buffers = set() if frontier is None else self._mark(turn, frontier)
        into = self._streams[stream]
        for number, item in enumerate(values):
            value, stamp = item if isinstance(item, tuple) else (item, None)
            into.outside.append(
                Arrival(
                    turn, -1, ids[number] if ids else f"{stream}/{len(into.outside)}", value, stamp
                )
            )
        self._recompute({stream, *buffers})

    def advance(self, frontier: int, now: int | None = None) -> None:
        """No row below the frontier comes any more.

        Buffers let go, except those whose writers are paused.
        """
        self._recompute(self._mark(self._begin(now), frontier))

    def attach(self, spec: Attachment, now: int | None = None) -> None:
        """Attach: the rows that are there are its backfill, later ones its head.

        Raises:
            ConfigurationError: it would close a cycle, or the name is taken.
        """
        if spec.name in self._attached:
            raise ConfigurationError(
                f"an attachment named {spec.name!r} is there already", code="streams.name_taken"
            )
        if any(self._reaches(to, spec.origin) for to in spec.to):
            raise ConfigurationError(
                f"{spec.name} would close a cycle through {spec.origin}", code="streams.cycle"
            )
        turn = self._begin(now)
        attached = self._attached[spec.name] = _Attached(spec, len(self._attached), turn)
        if spec.merge is MergeMode.SPLICE:
            self.requests[spec.name] = Request(spec.name, spec.to[0], [], attachment=spec.name)
        self._recompute(set(), {attached.spec.name})

    def detach(self, name: str) -> None:
        """No later row is dispatched; what was, stays. A second time changes nothing."""
        turn, attached = self._begin(None), self._attached[name]
        attached.until = turn if attached.until is None else attached.until

    def resume(self, name: str, now: int | None = None) -> None:
        """Go on with the row at which the attachment was paused."""
        turn, attached = self._begin(now), self._attached[name]
        if attached.failure is not None:
            attached.gaps.append((attached.failure.row_id, turn))
            attached.failure = None
            self._recompute(set(), {name})

    def request(
        self, request_id: str, destination: str, rows: Sequence[tuple[str, int, Value]]
    ) -> None:
        """A request made of rows (id, stamp, value) that lost their way.

        Late rows, dead letters, a file.
        """
        arrivals = [Arrival(0, -1, row_id, value, stamp) for row_id, stamp, value in rows]
        self.requests[request_id] = Request(request_id, destination, arrivals)

    def reject(self, request_id: str) -> None:
        """Leave everything as it is."""
        self._open(request_id).state = "rejected"

    def merge(self, request_id: str, now: int | None = None) -> None:
        """Insert the rows by stamp, existing first.

        Compute again whatever depends on it, from there on.

        Raises:
            PoisonError: a reducer fails over the rows as they would be; nothing was changed.
        """
        self._open(request_id)
        trial = copy.deepcopy(self)
        turn, request = trial._begin(now), trial.requests[request_id]
        request.state = "merged"
        trial._streams[request.destination].merges.append((turn, request_id))
        trial._recompute({request.destination})
        for name, attached in trial._attached.items():
            if attached.failure != self._attached[name].failure:
                raise PoisonError(
                    f"merging {request_id} would stop {name}: {attached.failure}",
                    code="splice.reducer_fails",
                    kept="everything as it was; the request is still open",
                    advice="mend the reducer, or reject the request",
                )
        self.__dict__ = trial.__dict__

    # how it works

    def _mark(self, turn: int, frontier: int) -> set[str]:
        buffers = {name for name, stream in self._streams.items() if stream.buffered}
        free = {
            name
            for name in buffers
            if not any(self._attached[a].failure for a in self._upstream(name))
        }
        for name in free:
            self._streams[name].marks.append((turn, frontier))
        return free

    def _begin(self, now: int | None) -> int:
        self._turn += 1
        self._clock.append(max(self._clock[-1], TICK_MIN if now is None else now))
        return self._turn

    def _open(self, request_id: str) -> Request:
        request = self.requests[request_id]
        if request.state != "created":
            raise ConfigurationError(
                f"request {request_id} was {request.state} already", code="splice.decided"
            )
        return request

    def _reaches(self, start: str, end: str) -> bool:
        onward = {to for a in self._attached.values() if a.spec.origin == start for to in a.spec.to}
        return start == end or any(self._reaches(to, end) for to in onward)

    def _upstream(self, stream: str) -> set[str]:
        names = {name for name, a in self._attached.items() if stream in a.spec.to}
        return names.union(*(self._upstream(self._attached[name].spec.origin) for name in names))

    def _recompute(self, changed: Set[str], attachments: Set[str] = frozenset()) -> None:
        """Place the rows of changed streams again, and run what reads them from the first change on,
        in order of the graph.
        """
        dirty = set(changed)
        for name in sorted(self._streams, key=self._depth):
            first = self._place(name) if name in dirty else None
            for attached in self._attached.values():
                if attached.spec.origin == name and (
                    first is not None or attached.spec.name in attachments
                ):
                    self._run(attached, len(attached.sent) if first is None else first)
                    dirty |= set(attached.spec.to)

    def _depth(self, stream: str) -> int:
        return max(
            (
                1 + self._depth(a.spec.origin)
                for a in self._attached.values()
                if stream in a.spec.to
            ),
            default=0,
        )

    def _run(self, attached: _Attached, start: int) -> None:
        del attached.sent[start:]
        del attached.states[start + 1 :]
        for index, (row, turn) in enumerate(self._due(attached)):
            if index < len(attached.sent):
                continue
            try:
                attached.sent.append(self._fold(attached, row, index, turn))
            except (
                Exception
            ) as error:  # a fold is a stranger's code: whatever it raises pauses it, and only it
                attached.failure = Failure(row.id, repr(error))
                break
        request = self.requests.get(attached.spec.name)
        if request is not None and request.attachment is not None:
            request.rows = list(attached.dispatches(request.destination, request=True))

    def _due(self, attached: _Attached) -> Iterator[tuple[StreamRow, int]]:
        """The rows an attachment has to see, each with the turn in which it sees it."""
        resumed = dict(attached.gaps)
        floor = attached.since
        for row in self._streams[attached.spec.origin].rows:
            floor = max(floor, resumed.get(row.id, floor))
            turn = max(row.turn, floor)
            stopped = attached.failure is not None and row.id == attached.failure.row_id
            if stopped or (attached.until is not None and turn >= attached.until):
                return
            yield row, turn

    def _fold(
        self, attached: _Attached, row: StreamRow, index: int, turn: int
    ) -> list[tuple[str, DispatchPhase, Arrival]]:
        spec, known = attached.spec, attached.states[-1]
        key = None if spec.key is None else spec.key(row.value)
        state, seen = known.get(key, (spec.initial, 0))
        event = Event(row.id, row.time, row.value)
        after, dispatches = spec.fold(
            copy.deepcopy(state), event, index if spec.key is None else seen
        )
        phase = DispatchPhase.BACKFILL if row.turn < attached.since else DispatchPhase.HEAD
        stamp = row.time if inherits_stamp(spec.inherit, spec.merge, phase) else None
        sent = []
        for nth, item in enumerate(dispatches):
            to, value = item if isinstance(item, tuple) else (spec.to[0], item)
            origin = RowOrigin(spec.name, spec.origin, row.id, nth)
            sent.append(
                (
                    to,
                    phase,
                    Arrival(
                        turn, attached.rank, f"{spec.name}:{row.id}#{nth}", value, stamp, origin
                    ),
                )
            )
        attached.states.append({**known, key: (after, seen + 1)})
        return sent

    def _place(self, name: str) -> int | None:
        """The rows of a stream from all that arrived.

        Returns the first position that differs, None if none does.
        """
        stream = self._streams[name]
        before = stream.rows
        stream.rows, stream.rejections = place_arrivals(
            name,
            self._arrivals(name),
            self._merged(stream),
            dict(stream.marks) if stream.buffered else None,
            self._clock,
            self._tick,
        )
        same = 0
        for old, new in zip(before, stream.rows, strict=False):
            if old != new:
                break
            same += 1
        return None if same == len(before) == len(stream.rows) else same

    def _arrivals(self, name: str) -> list[Arrival]:
        writers = [list(a.dispatches(name)) for a in self._attached.values() if name in a.spec.to]
        return [arrival for batch in (self._streams[name].outside, *writers) for arrival in batch]

    def _merged(self, stream: _Stream) -> dict[int, list[Arrival]]:
        return {
            turn: sorted(self.requests[r].rows, key=lambda a: a.stamp or 0)
            for turn, r in stream.merges
        }
