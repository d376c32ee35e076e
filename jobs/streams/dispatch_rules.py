"""The rules of streams: who stamps a dispatched row, and which stamps a stream accepts.

See `docs/semantics.md`, section 6. The types are plain frozen data; times are ticks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


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


class MergeMode(StrEnum):
    """What an attachment does with the rows that were there before it."""

    CONCAT = "concat"  # appends them
    # Collects them in one request, which the owner of the destination merges or rejects.
    SPLICE = "splice"


class DispatchPhase(StrEnum):
    """Whether a row of the origin was there before the attachment."""

    BACKFILL = "backfill"  # the row was there when the attachment was made
    HEAD = "head"  # it came later


@dataclass(frozen=True, slots=True)
class Event:
    """The row as a fold sees it: ``event["amount"]``, ``event.time``.

    It has neither clock nor position, because both may change.
    """

    id: str
    time: int
    value: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, column: str) -> Any:
        return self.value[column]
