"""Lists, filters and resolves checkpoints, for people and for recovery."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from pydantic import BaseModel, ConfigDict

from tidegate.checkpoints.bucket_layout import BucketLayout, CheckpointId
from tidegate.checkpoints.canonical_json import parse_json
from tidegate.checkpoints.manifest import Counters, FileRef, Manifest
from tidegate.checkpoints.pins import Roots, RootsFile
from tidegate.checkpoints.slot_index import READ_WORKERS, SlotIndex, SlotSummary
from tidegate.checkpoints.slot_log import LineageSegment, SlotLog
from tidegate.checkpoints.store import NotFoundError, Store
from tidegate.errors import ConfigurationError

_MOST_SUGGESTIONS = 5  # checkpoints that the error about an ambiguous prefix names

ListedCheckpoint = (
    SlotSummary  # a row of a listing: a summary with pins, condemnation and lineage filled in
)


class CheckpointCatalog:
    """The checkpoints of one pipeline."""

    def __init__(self, log: SlotLog, *, workers: int = READ_WORKERS) -> None:
        self.log = log
        self.index = SlotIndex(log, workers=workers)

    def list_checkpoints(
        self, *, all_timelines: bool = False, kinds: Iterable[str] = ("epoch",)
    ) -> list[SlotSummary]:
        """Checkpoints, newest first: those of the current lineage, or of all timelines."""
        roots = RootsFile(self.log.store, self.log.pipeline).read()
        head = self.log.head()
        lineage = self.log.lineage(head.timeline)
        wanted = set(kinds)
        # The pages that hold nothing but stubs are most of a long history.
        iterate = self.index.iterate_summaries if "stub" in wanted else self.index.iterate_retained
        rows = [
            row
            for timeline in range(head.timeline + 1)
            for row in iterate(timeline)
            if row.kind in wanted
        ]
        listed = _annotate_summaries(rows, roots, lineage)
        if all_timelines:
            listed = self.mark_gaps(listed)
        chosen = [row for row in listed if all_timelines or row.on_lineage]
        return sorted(chosen, key=lambda row: (row.slot, row.timeline), reverse=True)

    def resolve(
        self, text: str, *, healthy: Callable[[CheckpointId], bool] | None = None
    ) -> CheckpointId:
        """From what a person writes to a checkpoint id.

        Args:
            text: `latest`, `latest_healthy`, the name of a pin, a full id, or a prefix of an id
                that fits only one checkpoint.
            healthy: asked by `latest_healthy` about each candidate from the newest back, beyond not
                being condemned; by default the quality runs are.

        Raises:
            ConfigurationError: nothing fits, or several do; they are named.
        """
        if text == "latest":
            checkpoint = self.log.head().checkpoint
            if checkpoint is None:
                raise self._unknown_checkpoint_error(text, "nothing was sealed yet")
            return checkpoint
        if text == "latest_healthy":
            return self._find_latest_healthy(
                healthy or build_health_check(self.log.store, self.log.pipeline)
            )
        pin = RootsFile(self.log.store, self.log.pipeline).read().pins.get(text)
        if pin is not None:
            return CheckpointId.parse(pin.checkpoint)
        return self._find_by_prefix(text)

    def find_gap(self, target: CheckpointId) -> int | None:
        """Return the position of the first retired epoch between the current lineage and `target`.

        A restore would have to apply it again. None for checkpoints of the current lineage, which
        need nothing applied, and where every epoch is still there.
        """
        parting = self.log.find_parting(target)
        for part in self.log.lineage(target.timeline):
            last = target.slot if part.last is None else min(part.last, target.slot)
            first = max(part.first, parting + 1)
            for row in self.index.iterate_summaries(part.timeline, first=first, last=last):
                if row.kind == "stub":
                    return row.slot
        return None

    def mark_gaps(self, rows: list[SlotSummary]) -> list[SlotSummary]:
        """Return the rows with `gap` filled in for those that a retired epoch cuts off."""
        newest: dict[int, int] = {}
        for row in rows:
            newest[row.timeline] = max(row.slot, newest.get(row.timeline, 0))
        gaps = {
            timeline: self.find_gap(CheckpointId(timeline, slot, ""))
            for timeline, slot in newest.items()
        }

        def mark(row: SlotSummary) -> SlotSummary:
            gap = gaps[row.timeline]
            is_cut_off = row.kind == "epoch" and gap is not None and gap < row.slot
            return row.model_copy(update={"gap": gap}) if is_cut_off else row

        return [mark(row) for row in rows]

    def read_manifest(self, checkpoint: CheckpointId) -> Manifest:
        """The manifest of a checkpoint. Raises PoisonError when it was retired."""
        return self.log.open_checkpoint(checkpoint).epoch

    def _find_latest_healthy(self, healthy: Callable[[CheckpointId], bool]) -> CheckpointId:
        condemned = RootsFile(self.log.store, self.log.pipeline).read().condemned
        for stretch in reversed(self.log.lineage(self.log.head().timeline)):
            for row in self.index.iterate_newest_first(stretch.timeline):
                if (
                    row.kind == "epoch"
                    and row.id
                    and stretch.contains(row.slot)
                    and row.id not in condemned
                ):
                    checkpoint = CheckpointId.parse(row.id)
                    if healthy(checkpoint):
                        return checkpoint
        raise self._unknown_checkpoint_error(
            "latest_healthy", "every checkpoint is damaged or retired"
        )

    def _find_by_prefix(self, text: str) -> CheckpointId:
        try:
            checkpoint = CheckpointId.parse(text)
            self.log.open_checkpoint(checkpoint)  # a whole id needs no search
            return checkpoint
        except ConfigurationError:
            pass
        epochs = (
            row.id
            for timeline in range(self.log.head().timeline, -1, -1)
            for row in self.index.iterate_newest_first(timeline)
            if row.kind == "epoch" and row.id is not None and row.id.startswith(text)
        )
        fitting = [*islice(epochs, _MOST_SUGGESTIONS + 1)]
        if len(fitting) == 1:
            return CheckpointId.parse(fitting[0])
        shown = ", ".join(fitting[:_MOST_SUGGESTIONS])
        shown += " ..." if len(fitting) > _MOST_SUGGESTIONS else ""
        raise self._unknown_checkpoint_error(
            text, f"it could be {shown}" if fitting else "there is no such checkpoint or pin"
        )

    def _unknown_checkpoint_error(self, text: str, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"{text!r} does not name a checkpoint of {self.log.pipeline}: {why}",
            code="checkpoint.unknown",
            pipeline=self.log.pipeline,
            advice="see: tidegate checkpoints list",
        )


def _annotate_summaries(
    rows: Iterable[SlotSummary], roots: Roots, lineage: list[LineageSegment]
) -> list[SlotSummary]:
    """The rows with pins, condemnations and lineage filled in.

    Most rows have nothing to fill in and stay as they are.
    """
    pins: dict[str, list[str]] = {}
    for name, pin in sorted(roots.pins.items()):
        pins.setdefault(pin.checkpoint, []).append(name)
    condemned = {
        checkpoint: f"{entry.reason}: {entry.detail}"
        for checkpoint, entry in roots.condemned.items()
    }
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


# Which checkpoints the quality runs found healthy, for `recover_to: latest_healthy`. Light: no
# pandas, no GX.


def build_health_check(store: Store, pipeline: str) -> Callable[[CheckpointId], bool]:
    """A judge of checkpoints, from the history of quality runs as it is now.

    A run looks at everything up to its checkpoint. So a run without a critical failure speaks for
    that checkpoint and all before it on its timeline; a failing one speaks against all that no such
    run speaks for, later ones included. Where nobody ever checked, nothing is held against a
    checkpoint.
    """
    well: dict[int, int] = {}
    ill: dict[int, int] = {}
    for checkpoint, verdict in _read_quality_runs(store, pipeline):
        noted = ill if verdict == "fail" else well
        noted[checkpoint.timeline] = max(noted.get(checkpoint.timeline, 0), checkpoint.slot)

    def is_healthy(checkpoint: CheckpointId) -> bool:
        spoken_for = well.get(checkpoint.timeline, 0)
        return checkpoint.slot <= spoken_for or ill.get(checkpoint.timeline, 0) <= spoken_for

    return is_healthy


def _read_quality_runs(store: Store, pipeline: str) -> list[tuple[CheckpointId, str]]:
    try:
        runs = parse_json(store.get(f"{BucketLayout(pipeline).quality_prefix}history.json").data)[
            "runs"
        ]
    except (NotFoundError, ValueError, KeyError):
        return []
    return [
        (CheckpointId.parse(run["checkpoint"]), run["verdict"]) for run in runs if run["checkpoint"]
    ]


# What differs between two checkpoints: rows, frontiers, windows, tables, state, sources, spec.


class DifferingPair(BaseModel):
    """One thing on both sides; None where a side does not have it."""

    model_config = ConfigDict(frozen=True)

    left: Any
    right: Any


class CheckpointDiff(BaseModel):
    """Everything that differs, by name. Empty dictionaries mean: equal.

    Attributes:
        same: neither rows, positions, decider, tables nor state differ.
        counters: rows by disposition, right minus left.
        positions: per source partition, where each side stands.
        decider: top-level entries of the decider's state (frontiers, statuses, open barriers) that
            differ.
        state: live rows per kind of segment.
        tables: rows the two epochs themselves wrote, per table.
    """

    model_config = ConfigDict(frozen=True)

    left: str
    right: str
    same: bool
    spec_changed: bool
    counters: dict[str, int]
    positions: dict[str, DifferingPair]
    decider: dict[str, DifferingPair]
    state: dict[str, DifferingPair]
    tables: dict[str, DifferingPair]


def diff_checkpoints(left: Manifest, right: Manifest) -> CheckpointDiff:
    """Compare two checkpoints of one pipeline."""
    counters = _subtract_counters(
        _flatten_counters(left.counters), _flatten_counters(right.counters)
    )
    positions = _pair_differences(_extract_positions(left.cut), _extract_positions(right.cut))
    decider = _pair_differences(_flatten_tree(left.decider), _flatten_tree(right.decider))
    state = _pair_differences(_sum_rows_by_kind(left.segments), _sum_rows_by_kind(right.segments))
    tables = _pair_differences(
        *(
            {table: _sum_file_rows(files) for table, files in side.files.items()}
            for side in (left, right)
        )
    )
    return CheckpointDiff(
        left=str(left.id),
        right=str(right.id),
        same=not (counters or positions or decider or state or tables),
        spec_changed=left.spec_digest != right.spec_digest,
        counters=counters,
        positions=positions,
        decider=decider,
        state=state,
        tables=tables,
    )


def _flatten_counters(counters: Counters) -> dict[str, int]:
    plain = {name: value for name, value in dict(counters).items() if isinstance(value, int)}
    return plain | {f"dropped.{reason}": count for reason, count in counters.dropped.items()}


def _subtract_counters(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    names = sorted({*left, *right})
    return {name: change for name in names if (change := right.get(name, 0) - left.get(name, 0))}


def _pair_differences(left: dict[str, Any], right: dict[str, Any]) -> dict[str, DifferingPair]:
    names = sorted({*left, *right})
    return {
        name: DifferingPair(left=left.get(name), right=right.get(name))
        for name in names
        if left.get(name) != right.get(name)
    }


def _extract_positions(cut: dict[str, Any]) -> dict[str, Any]:
    """The end of each slice where the cut has one, else the whole entry."""
    return {
        member: part["end"] if isinstance(part, dict) and "end" in part else part
        for member, part in cut.items()
    }


def _flatten_tree(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= (
            _flatten_tree(value, f"{prefix}{name}.")
            if isinstance(value, dict) and value
            else {prefix + name: value}
        )
    return flat


def _sum_file_rows(files: list[FileRef]) -> int:
    return sum(file.rows for file in files)


def _sum_rows_by_kind(files: list[FileRef]) -> dict[str, int]:
    kinds = sorted({file.kind for file in files})
    return {kind: _sum_file_rows([file for file in files if file.kind == kind]) for kind in kinds}
