"""The two rules of streams: who stamps a dispatched row, and which stamps a stream accepts (semantics.md section 6)."""

from __future__ import annotations

from tidegate.jobs.streams.types import MergeMode, DispatchPhase

__all__ = ["compute_stream_time", "is_collected", "inherits_stamp"]


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
