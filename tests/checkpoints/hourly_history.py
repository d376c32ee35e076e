"""A log with a clock, restores and retention: epochs an hour apart."""

from __future__ import annotations

from tests.checkpoints.conftest import Author
from tests.manual_clock import ManualClock

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_log import SlotLog


class HourlyHistory:
    """A log with a clock: epochs an hour apart, restores, and retention that keeps a day."""

    def __init__(self, log: SlotLog, author: Author) -> None:
        self.clock = ManualClock(wall_ticks=1_750_000_000_000_000)
        self.log = SlotLog(log.store, "p", clock=self.clock)
        self.catalog = CheckpointCatalog(self.log, workers=1)
        self._author, self._restores = author, 0

    def seal(self, count: int) -> list[Manifest]:
        """Seal epochs, one an hour."""
        made = []
        for _ in range(count):
            self.clock.advance(3600)
            made.append(self._author.seal(self.log, created_at=self.clock.wall_ticks()))
        return made

    def restore(self, target: CheckpointId) -> int:
        """Restore; return how many epochs come back."""
        self._restores += 1
        holder = ProcessIdentity.this_process("restore")
        lease = Lease.acquire(self.log.store, "p", holder, clock=self.clock)
        plan = plan_restore(self.log, target)
        commit_restore(self.log, lease, plan, request_id=f"r{self._restores}", who="ann", why="")
        lease.release()
        return plan.epochs_regained

    def retire(self, hours: float) -> int:
        """Keep the newest epoch and those of so many hours; return how many were retired."""
        policy = RetentionPolicy(keep_last=1, keep_for=hours * 3600, grace=0)
        return len(Retention(self.log, policy, external=tuple, clock=self.clock).run().retired)

    def kinds(self, timeline: int) -> str:
        """A letter per slot of a timeline."""
        return "".join(row.kind[0] for row in self.catalog.index.iterate_summaries(timeline))
