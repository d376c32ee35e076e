"""The two rules of streams.

Who stamps a dispatched row, and which stamps a stream accepts (semantics.md section 6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


def inherits_stamp(inherit: bool, merge: MergeMode, phase: DispatchPhase) -> bool:
    """Whether a dispatched row carries its parent's stamp; otherwise the destination stamps it.

    | inherit | merge  | backfill    | head        |
    |---------|--------|-------------|-------------|
    | yes     | concat | destination | parent      |
    | yes     | splice | parent      | parent      |
    | no      | concat | destination | destination |
    | no      | splice | parent      | destination |
    """
    return inherit if phase is DispatchPhase.HEAD else merge is MergeMode.SPLICE


def is_collected(merge: MergeMode, phase: DispatchPhase) -> bool:
    """Whether a dispatched row goes into the attachment's splice request instead of the destination."""
    return merge is MergeMode.SPLICE and phase is DispatchPhase.BACKFILL


def compute_stream_time(last: int | None, now: int, stamp: int | None) -> int | None:
    """The stream time of an append, or None when it is rejected.

    Unstamped: ``max(now, last)``. Stamped: the stamp, if it is not below the last.

    >>> compute_stream_time(100, 0, 90), compute_stream_time(100, 0, 100), compute_stream_time(100, 95, None), compute_stream_time(100, 130, None)
    (None, 100, 100, 130)
    """
    if stamp is None:
        return now if last is None else max(now, last)
    return stamp if last is None or stamp >= last else None


# Rows of streams and what happens to them (semantics.md section 6). Plain frozen data, no I/O.
# Times are ticks.


class MergeMode(StrEnum):
    """What an attachment does with the rows that were there before it."""

    CONCAT = "concat"  # appends them
    SPLICE = (  # collects them in one request, which the owner of the destination merges or rejects
        "splice"
    )


class DispatchPhase(StrEnum):
    """Where an attachment stands with one row of its origin."""

    BACKFILL = "backfill"  # the row was there when the attachment was made
    HEAD = "head"  # it came later


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """Who dispatched a row.

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
        turn: when it came, in the order of the world's turns (in a pipeline: the epoch). A merged
            row came with its predecessor, or with the first row.
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
    """A dispatch that the destination refused: logged on the origin stream."""

    stream: str
    row_id: str
    destination: str
    attachment: str
    stamp: int
    last: int

    @property
    def reason(self) -> str:
        """In words."""
        return f"stamp {self.stamp} is below {self.last}, the last of {self.destination}"


@dataclass(frozen=True, slots=True)
class Event:
    """What a fold sees of a row: ``event["amount"]``, ``event.time``.

    Neither clock nor position: both may change.
    """

    id: str
    time: int
    value: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, column: str) -> Any:
        return self.value[column]
