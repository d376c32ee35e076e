"""Lists, filters and resolves checkpoints, for people and for recovery."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tidegate.checkpoints.index import WORKERS, SlotIndex, Summary
from tidegate.checkpoints.layout import CheckpointId
from tidegate.checkpoints.log import SlotLog
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.roots import Roots, RootsFile
from tidegate.jobs.spec.errors import ConfigurationError

__all__ = ["Catalog", "Listed"]


class Listed(Summary):
    """A summary as people see it: with what `roots.json` says about it."""

    pins: tuple[str, ...] = ()
    condemned: str | None = None
    on_lineage: bool = True

    @property
    def restorable(self) -> bool:
        """Whether it can be restored as far as is known."""
        return self.kind == "epoch" and self.condemned is None


class Catalog:
    """The checkpoints of one pipeline."""

    def __init__(self, log: SlotLog, *, workers: int = WORKERS) -> None:
        self.log = log
        self.index = SlotIndex(log, workers=workers)

    def listing(self, *, all_timelines: bool = False, kinds: Iterable[str] = ("epoch",)) -> list[Listed]:
        """Checkpoints, newest first: those of the current lineage, or of all timelines."""
        roots = RootsFile(self.log.store, self.log.pipeline).read()
        head = self.log.head()
        lineage = self.log.lineage(head.timeline)
        wanted = set(kinds)
        rows = [row for timeline in range(head.timeline + 1) for row in self.index.rows(timeline) if row.kind in wanted]
        listed = [_listed(row, roots, any(s.timeline == row.timeline and s.holds(row.slot) for s in lineage)) for row in rows]
        chosen = [row for row in listed if all_timelines or row.on_lineage]
        return sorted(chosen, key=lambda row: (row.slot, row.timeline), reverse=True)

    def resolve(self, text: str, *, healthy: Callable[[CheckpointId], bool] | None = None) -> CheckpointId:
        """From what a person writes to a checkpoint id.

        Args:
            text: `latest`, `latest_healthy`, the name of a pin, a full id, or a prefix of an id that fits only one checkpoint.
            healthy: asked by `latest_healthy` about each candidate from the newest back, beyond not being condemned.

        Raises:
            ConfigurationError: nothing fits, or several do; they are named.
        """
        if text == "latest":
            checkpoint = self.log.head().checkpoint
            if checkpoint is None:
                raise self._nothing(text, "nothing was sealed yet")
            return checkpoint
        if text == "latest_healthy":
            return self._latest_healthy(healthy or (lambda checkpoint: True))
        pin = RootsFile(self.log.store, self.log.pipeline).read().pins.get(text)
        if pin is not None:
            return CheckpointId.parse(pin.checkpoint)
        return self._by_prefix(text)

    def show(self, checkpoint: CheckpointId) -> Manifest:
        """The manifest of a checkpoint. Raises PoisonError when it was retired."""
        return self.log.open(checkpoint).epoch

    def _latest_healthy(self, healthy: Callable[[CheckpointId], bool]) -> CheckpointId:
        for row in self.listing():
            if row.restorable and row.id is not None and healthy(CheckpointId.parse(row.id)):
                return CheckpointId.parse(row.id)
        raise self._nothing("latest_healthy", "every checkpoint is damaged or retired")

    def _by_prefix(self, text: str) -> CheckpointId:
        fitting = [row.id for row in self.listing(all_timelines=True) if row.id is not None and row.id.startswith(text)]
        if len(fitting) == 1:
            return CheckpointId.parse(fitting[0])
        shown = ", ".join(fitting[:5]) + (" ..." if len(fitting) > 5 else "")
        raise self._nothing(text, f"it could be {shown}" if fitting else "there is no such checkpoint or pin")

    def _nothing(self, text: str, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"{text!r} does not name a checkpoint of {self.log.pipeline}: {why}",
            code="checkpoint.unknown",
            pipeline=self.log.pipeline,
            advice="see: tidegate checkpoints list",
        )

def _listed(row: Summary, roots: Roots, on_lineage: bool) -> Listed:
    entry = roots.condemned.get(row.id) if row.id else None
    pins = tuple(sorted(name for name, pin in roots.pins.items() if pin.checkpoint == row.id))
    condemned = f"{entry.reason}: {entry.detail}" if entry else None
    return Listed.model_construct(**dict(row), pins=pins, condemned=condemned, on_lineage=on_lineage)
