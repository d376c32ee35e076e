"""Where the rows of one stream lie, computed from all that arrived at it (docs/decisions/0030-*).

Per turn, arrivals are placed in order of their stamps, and each writer keeps its own order. The rule
of `compute_stream_time` accepts or rejects each. Merged rows come after the rows of the same stamp
that were there when they were merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.time_units import TICK_MAX, TICK_MIN


def compute_stream_time(last: int | None, now: int, stamp: int | None) -> int | None:
    """Return the stream time of an append, or None if it is rejected.

    Without a stamp it is ``max(now, last)``. A stamp is accepted if it is not below `last`.

    >>> compute_stream_time(100, 0, 90), compute_stream_time(100, 0, 100)
    (None, 100)
    >>> compute_stream_time(100, 95, None), compute_stream_time(100, 130, None)
    (100, 130)
    """
    if stamp is None:
        return now if last is None else max(now, last)
    return stamp if last is None or stamp >= last else None


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """Where a dispatched row comes from.

    The attachment, the row it was made of, and which of that row's dispatches it is.
    """

    attachment: str
    stream: str
    row_id: str
    nth: int


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One row of a stream.

    Attributes:
        id: identity; survives re-indexing.
        position: zero-based and contiguous; a merge before it moves it up.
        time: its stamp on this stream, the stream time; never below its predecessor's.
        turn: the turn in which it came (in a pipeline: the epoch). A merged row came with its
            predecessor, or with the first row.
        at: clock of that turn.
        origin: None for rows from outside.
    """

    id: str
    position: int
    time: int
    value: Mapping[str, Any]
    turn: int = 0
    at: int = 0
    origin: RowOrigin | None = None


@dataclass(frozen=True, slots=True)
class Rejection:
    """A dispatch that the destination rejected; it is logged on the origin stream."""

    stream: str
    row_id: str
    destination: str
    attachment: str
    stamp: int
    last: int

    @property
    def reason(self) -> str:
        """The reason as a sentence."""
        return f"stamp {self.stamp} is below {self.last}, the last of {self.destination}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A row on its way to a stream. `rank`: which writer; rows from outside come first."""

    turn: int
    rank: int
    id: str
    value: Mapping[str, Any]
    stamp: int | None
    origin: RowOrigin | None = None


@dataclass(slots=True)
class _Slot:
    """An accepted row before it has a position.

    `turn` is None for a merged row, `merged` the turn of its merge.
    """

    time: int
    turn: int | None
    arrival: Arrival
    merged: int = 0


def place_arrivals(
    name: str,
    arrivals: Sequence[Arrival],
    merged: Mapping[int, list[Arrival]],
    marks: Mapping[int, int] | None,
    clock: Sequence[int],
    tick: int,
) -> tuple[list[StreamRow], list[Rejection]]:
    """Return the rows of a stream in order, and what it rejected.

    Args:
        name: of the stream.
        arrivals: all that arrived, but for merged rows.
        merged: turn -> rows that were merged in it, in order of their stamps.
        marks: turn -> rows below this leave the buffer; None for a stream without a buffer.
        clock: clock of each turn.
        tick: how far the clock moves with every row of a turn.
    """
    slots: list[_Slot] = []
    rejections: list[Rejection] = []
    last: int | None = None
    for turn, batch, lost in _turns(arrivals, merged, marks, clock):
        for number, arrival in enumerate(batch):
            stamp = (
                max(TICK_MIN if last is None else last, _wanted(arrival, clock))
                if marks is not None
                else arrival.stamp
            )
            time = compute_stream_time(last, clock[turn] + tick * number, stamp)
            if time is None:
                origin = arrival.origin or RowOrigin("", name, arrival.id, 0)
                rejections.append(
                    Rejection(
                        origin.stream, origin.row_id, name, origin.attachment, stamp or 0, last or 0
                    )
                )
                continue
            last = time
            slots.append(_Slot(time, turn, arrival))
        for arrival in lost:
            time = arrival.stamp or 0
            last = time if last is None else max(last, time)
            slots.append(_Slot(time, None, arrival, turn))
    slots.sort(key=lambda slot: slot.time)  # stable: existing rows first on ties
    return _numbered(slots, clock), rejections


def _numbered(slots: Sequence[_Slot], clock: Sequence[int]) -> list[StreamRow]:
    rows, turn = list[StreamRow](), 0
    first = next((slot.turn for slot in slots if slot.turn is not None), TICK_MAX)
    for position, slot in enumerate(slots):
        # A merged row counts as come with the row before it; in front, with the first one that was
        # there, if any was.
        turn = max(
            turn, min(first, slot.merged) if slot.turn is None and not turn else slot.turn or 0
        )
        a = slot.arrival
        rows.append(StreamRow(a.id, position, slot.time, a.value, turn, clock[turn], a.origin))
    return rows


def _wanted(arrival: Arrival, clock: Sequence[int]) -> int:
    return clock[arrival.turn] if arrival.stamp is None else arrival.stamp


def _turns(
    arrivals: Sequence[Arrival],
    merged: Mapping[int, list[Arrival]],
    marks: Mapping[int, int] | None,
    clock: Sequence[int],
) -> Iterator[tuple[int, list[Arrival], list[Arrival]]]:
    """Per turn: what is appended, in order, and what is merged."""
    batches: dict[int, list[Arrival]] = {}
    for arrival in arrivals:
        batches.setdefault(arrival.turn, []).append(arrival)
    held = list[Arrival]()
    for turn in sorted({*batches, *merged, *(marks or ())}):
        batch = _in_order(batches.get(turn, []), clock[turn])
        if marks is not None:
            held = sorted([*held, *batch], key=lambda a: _wanted(a, clock))
            mark = marks.get(turn, TICK_MIN)
            batch, held = (
                [a for a in held if _wanted(a, clock) < mark],
                [a for a in held if _wanted(a, clock) >= mark],
            )
        yield turn, batch, merged.get(turn, [])


def _in_order(batch: Sequence[Arrival], now: int) -> list[Arrival]:
    """Writers of one turn are merged by stamp.

    Each keeps its own order, whatever its stamps say.
    """
    high: dict[int, int] = {}
    keyed = []
    for arrival in batch:
        high[arrival.rank] = max(
            high.get(arrival.rank, TICK_MIN), now if arrival.stamp is None else arrival.stamp
        )
        keyed.append(((high[arrival.rank], arrival.rank), arrival))
    return [arrival for _, arrival in sorted(keyed, key=lambda pair: pair[0])]
