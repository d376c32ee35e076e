"""Whether people want a pipeline to run (`desired.json`), whatever its drivers do at the moment.

The sweep starts only pipelines that people want to run. A driver that is started in another way is
kept from running only if a person has stopped the pipeline or a restore is under way.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.errors import DESIRED_STATE_MOVED
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.shared_documents import SharedDocument, change_document, read_document
from tidegate.checkpoints.store import Store

# Ticks. Generous, because clocks of two hosts are compared: a restore takes a minute at most.
_ABANDONED_AFTER = 15 * 60 * 1_000_000


class DesiredState(StrEnum):
    """What people want of a pipeline."""

    RUN = "run"
    STOPPED = "stopped"  # by a person; nothing starts it but a person
    RECOVERING = "recovering"  # a restore is under way; nothing else may start it


class DesiredDocument(SharedDocument):
    """The content of `desired.json`. A pipeline that was never started counts as stopped.

    Attributes:
        who: who wants it; empty before anything was wanted.
        at: wall clock of the host that recorded it, microseconds UTC.
        run: how often a stopped pipeline was started again.
    """

    state: DesiredState = DesiredState.STOPPED
    who: str = ""
    why: str = ""
    at: int = 0
    run: int = Field(default=0, exclude_if=lambda number: number == 0)

    @property
    def keeps_drivers_away(self) -> bool:
        """Whether a person or a restore has asked that no driver runs now."""
        return self.who != "" and self.state is not DesiredState.RUN


def read_desired_state(store: Store, pipeline: str) -> DesiredDocument:
    """Return what people want now; stopped, without a `who`, if the pipeline was never started."""
    found, _ = read_document(store, BucketLayout(pipeline).desired_key, DesiredDocument)
    return found or DesiredDocument()


def set_desired_state(
    store: Store,
    pipeline: str,
    state: DesiredState,
    *,
    who: str,
    why: str = "",
    only_from: DesiredState | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> DesiredDocument:
    """Record what people want of a pipeline, by compare-and-swap, and return the document.

    The same state, person and reason again change nothing, whatever `only_from` is.

    Args:
        store: the bucket.
        pipeline: its name.
        state: what is wanted from now on.
        who: who wants it.
        why: the reason.
        only_from: the state that the caller expects; None: any.
        clock: gives the time to record.

    Raises:
        ConfigurationError: another state than `only_from` is wanted.
    """

    def apply_state(before: DesiredDocument) -> DesiredDocument:
        if before.state is state and before.who == who and before.why == why:
            return before
        if only_from is not None and before.state is not only_from:
            raise DESIRED_STATE_MOVED(
                pipeline=pipeline, state=before.state, who=before.who or "no one", only=only_from
            )
        # `who` is empty before anything was wanted: the first start follows no stop.
        starts = before.who and (before.state, state) == (DesiredState.STOPPED, DesiredState.RUN)
        run = before.run + bool(starts)
        return before.model_copy(
            update={"state": state, "who": who, "why": why, "at": clock.wall_ticks(), "run": run}
        )

    return change_document(
        store, BucketLayout(pipeline).desired_key, DesiredDocument(), apply_state
    )


def end_abandoned_recovery(
    store: Store, pipeline: str, *, who: str, clock: Clock = SYSTEM_CLOCK
) -> DesiredDocument:
    """End a recovery whose process was killed, and return what people want then.

    A recovery counts as abandoned 15 minutes after its begin (or after this call, if its begin is
    in the future of this host); the pipeline is then wanted running. Otherwise nothing ends. The
    restore is one PUT, so it either happened or did not; the next driver finds in the log where to
    continue.
    """

    def end_recovery(before: DesiredDocument) -> DesiredDocument:
        now = clock.wall_ticks()
        if before.state is not DesiredState.RECOVERING:
            return before
        if before.at > now:  # written under a clock that is ahead: count from here on
            return before.model_copy(update={"at": now})
        if now - before.at < _ABANDONED_AFTER:
            return before
        why = f"the recovery begun by {before.who} was abandoned"
        return before.model_copy(
            update={"state": DesiredState.RUN, "who": who, "why": why, "at": now}
        )

    desired = read_desired_state(store, pipeline)
    if end_recovery(desired) is desired:
        return desired
    key = BucketLayout(pipeline).desired_key
    return change_document(store, key, DesiredDocument(), end_recovery)
