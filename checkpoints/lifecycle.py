"""The life of one checkpoint attempt, as an enum with a guard instead of booleans."""

from __future__ import annotations

from enum import StrEnum

from tidegate.jobs.spec.errors import PoisonError

__all__ = ["AttemptLifecycle", "CheckpointState"]


class CheckpointState(StrEnum):
    """Where an attempt stands. Only COMPLETE can be restored."""

    TRIGGERED = "triggered"  # step 1: the cut is chosen
    SNAPSHOT = "snapshot"  # step 4: Spark is writing what the decision asks for
    PERSISTED = "persisted"  # step 4 done: every file is durable
    ACKNOWLEDGED = "acknowledged"  # step 5: the PUT was sent; its fate is what fills the slot
    COMPLETE = "complete"  # this attempt fills the slot
    ABORTED = "aborted"  # the PUT was never sent, or another attempt fills the slot


_ALLOWED_NEXT = {
    CheckpointState.TRIGGERED: {CheckpointState.SNAPSHOT, CheckpointState.ABORTED},
    CheckpointState.SNAPSHOT: {CheckpointState.PERSISTED, CheckpointState.ABORTED},
    CheckpointState.PERSISTED: {CheckpointState.ACKNOWLEDGED, CheckpointState.ABORTED},
    CheckpointState.ACKNOWLEDGED: {CheckpointState.COMPLETE, CheckpointState.ABORTED},
    CheckpointState.COMPLETE: set[CheckpointState](),
    CheckpointState.ABORTED: set[CheckpointState](),
}


class AttemptLifecycle:
    """The guard: one attempt's state, which only moves along the allowed edges.

    From ACKNOWLEDGED on, only evidence from the slot may move it: pass `slot_holds_other=True` to abort, because an attempt
    whose PUT was sent is never aborted on absence.
    """

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        self.state = CheckpointState.TRIGGERED

    def move_to(self, state: CheckpointState, *, slot_holds_other: bool = False) -> None:
        """Move on.

        Raises:
            PoisonError: the edge is not allowed; a defect of the caller.
        """
        sent = self.state is CheckpointState.ACKNOWLEDGED
        if state not in _ALLOWED_NEXT[self.state] or (sent and state is CheckpointState.ABORTED and not slot_holds_other):
            raise PoisonError(
                f"checkpoint {self.checkpoint} cannot go from {self.state} to {state}",
                code="checkpoint.bad_transition",
            )
        self.state = state

    @property
    def is_decided(self) -> bool:
        """Whether the fate is known."""
        return not _ALLOWED_NEXT[self.state]
