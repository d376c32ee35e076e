"""Whether a pipeline should run: what people want, as against what is.

The sweep starts only what somebody wants to run. A driver that was started anyhow keeps away only
where somebody has said so.
"""

from __future__ import annotations

from enum import StrEnum

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.shared_documents import SharedDocument, change_document, read_document
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError

# Ticks. Generous, because clocks of two hosts are compared: a restore takes a minute at most.
_ABANDONED_AFTER = 15 * 60 * 1_000_000


class DesiredState(StrEnum):
    """What somebody wants of a pipeline."""

    RUN = "run"
    STOPPED = "stopped"  # by a person; nothing starts it but a person
    RECOVERING = "recovering"  # a restore is under way; nothing else may start it


class DesiredDocument(SharedDocument):
    """The bytes of `desired.json`. A pipeline nobody ever started is stopped."""

    state: DesiredState = DesiredState.STOPPED
    who: str = ""
    why: str = ""
    at: int = 0

    @property
    def keeps_drivers_away(self) -> bool:
        """Whether somebody has said that nothing may drive now."""
        return self.who != "" and self.state is not DesiredState.RUN


def read_desired_state(store: Store, pipeline: str) -> DesiredDocument:
    """What is wanted now."""
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
    """Say what is wanted, by compare-and-swap.

    With `only_from`, refuse when something else is wanted in the meantime.

    Raises:
        ConfigurationError: `only_from` no longer holds.
    """

    def apply_state(before: DesiredDocument) -> DesiredDocument:
        if before.state is state and before.who == who and before.why == why:
            return before
        if only_from is not None and before.state is not only_from:
            raise ConfigurationError(
                f"{pipeline} should be {before.state} (said by {before.who or 'nobody'}), not"
                f" {only_from}",
                code="desired.moved",
                pipeline=pipeline,
                kept="the wish as it was",
                advice=f"look again with: tidegate status {pipeline}",
            )
        return before.model_copy(
            update={"state": state, "who": who, "why": why, "at": clock.wall_ticks()}
        )

    return change_document(
        store, BucketLayout(pipeline).desired_key, DesiredDocument(), apply_state
    )


def end_abandoned_recovery(
    store: Store, pipeline: str, *, who: str, clock: Clock = SYSTEM_CLOCK
) -> DesiredDocument:
    """Return what is wanted now, after a recovery whose process was killed has been ended.

    The restore itself is one PUT, so it either happened or did not; in both cases the next driver
    finds in the log where to continue.
    """

    def end_recovery(before: DesiredDocument) -> DesiredDocument:
        now = clock.wall_ticks()
        if before.state is not DesiredState.RECOVERING or now - before.at < _ABANDONED_AFTER:
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
