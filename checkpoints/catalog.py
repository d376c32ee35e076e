"""Lists, filters and resolves checkpoints, for people and for recovery."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tidegate.checkpoints.health import build_health_check
from tidegate.checkpoints.index import READ_WORKERS, SlotIndex, SlotSummary
from tidegate.checkpoints.layout import CheckpointId
from tidegate.checkpoints.log import SlotLog, LineageSegment
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.roots import Roots, RootsFile
from tidegate.jobs.spec.errors import ConfigurationError

__all__ = ["CheckpointCatalog", "ListedCheckpoint"]

ListedCheckpoint = SlotSummary  # a row of a listing: a summary with pins, condemnation and lineage filled in


class CheckpointCatalog:
    """The checkpoints of one pipeline."""

    def __init__(self, log: SlotLog, *, workers: int = READ_WORKERS) -> None:
        self.log = log
        self.index = SlotIndex(log, workers=workers)

    def list_checkpoints(self, *, all_timelines: bool = False, kinds: Iterable[str] = ("epoch",)) -> list[SlotSummary]:
        """Checkpoints, newest first: those of the current lineage, or of all timelines."""
        roots = RootsFile(self.log.store, self.log.pipeline).read()
        head = self.log.head()
        lineage = self.log.lineage(head.timeline)
        wanted = set(kinds)
        rows = [row for timeline in range(head.timeline + 1) for row in self.index.summaries_of(timeline) if row.kind in wanted]
        listed = _annotate_summaries(rows, roots, lineage)
        chosen = [row for row in listed if all_timelines or row.on_lineage]
        return sorted(chosen, key=lambda row: (row.slot, row.timeline), reverse=True)

    def resolve(self, text: str, *, healthy: Callable[[CheckpointId], bool] | None = None) -> CheckpointId:
        """From what a person writes to a checkpoint id.

        Args:
            text: `latest`, `latest_healthy`, the name of a pin, a full id, or a prefix of an id that fits only one checkpoint.
            healthy: asked by `latest_healthy` about each candidate from the newest back, beyond not being condemned; by
                default the quality runs are.

        Raises:
            ConfigurationError: nothing fits, or several do; they are named.
        """
        if text == "latest":
            checkpoint = self.log.head().checkpoint
            if checkpoint is None:
                raise self._unknown_checkpoint_error(text, "nothing was sealed yet")
            return checkpoint
        if text == "latest_healthy":
            return self._find_latest_healthy(healthy or build_health_check(self.log.store, self.log.pipeline))
        pin = RootsFile(self.log.store, self.log.pipeline).read().pins.get(text)
        if pin is not None:
            return CheckpointId.parse(pin.checkpoint)
        return self._find_by_prefix(text)

    def read_manifest(self, checkpoint: CheckpointId) -> Manifest:
        """The manifest of a checkpoint. Raises PoisonError when it was retired."""
        return self.log.open_checkpoint(checkpoint).epoch

    def _find_latest_healthy(self, healthy: Callable[[CheckpointId], bool]) -> CheckpointId:
        condemned = RootsFile(self.log.store, self.log.pipeline).read().condemned
        for stretch in reversed(self.log.lineage(self.log.head().timeline)):
            for row in self.index.iterate_newest_first(stretch.timeline):
                if row.kind == "epoch" and row.id and stretch.contains(row.slot) and row.id not in condemned:
                    checkpoint = CheckpointId.parse(row.id)
                    if healthy(checkpoint):
                        return checkpoint
        raise self._unknown_checkpoint_error("latest_healthy", "every checkpoint is damaged or retired")

    def _find_by_prefix(self, text: str) -> CheckpointId:
        fitting = [row.id for row in self.list_checkpoints(all_timelines=True) if row.id is not None and row.id.startswith(text)]
        if len(fitting) == 1:
            return CheckpointId.parse(fitting[0])
        shown = ", ".join(fitting[:5]) + (" ..." if len(fitting) > 5 else "")
        raise self._unknown_checkpoint_error(text, f"it could be {shown}" if fitting else "there is no such checkpoint or pin")

    def _unknown_checkpoint_error(self, text: str, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"{text!r} does not name a checkpoint of {self.log.pipeline}: {why}",
            code="checkpoint.unknown",
            pipeline=self.log.pipeline,
            advice="see: tidegate checkpoints list",
        )


def _annotate_summaries(rows: Iterable[SlotSummary], roots: Roots, lineage: list[LineageSegment]) -> list[SlotSummary]:
    """The rows with pins, condemnations and lineage filled in; most rows have nothing to fill in and stay as they are."""
    pins: dict[str, list[str]] = {}
    for name, pin in sorted(roots.pins.items()):
        pins.setdefault(pin.checkpoint, []).append(name)
    condemned = {checkpoint: f"{entry.reason}: {entry.detail}" for checkpoint, entry in roots.condemned.items()}
    known = {stretch.timeline: stretch for stretch in lineage}
    listed = []
    for row in rows:
        stretch, change = known.get(row.timeline), dict[str, Any]()
        if row.id in pins:
            change["pins"] = tuple(pins[row.id])
        if row.id in condemned:
            change["condemned"] = condemned[row.id]
        if stretch is None or not stretch.contains(row.slot):
            change["on_lineage"] = False
        listed.append(row.model_copy(update=change) if change else row)
    return listed
