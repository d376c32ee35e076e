"""Lists, filters and resolves checkpoints, for people and for recovery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Any

from tidegate.errors import ConfigurationError
from tidegate.json_types import JsonObject

from .batch_notes import BatchNotes
from .bucket_layout import CheckpointId
from .errors import CHECKPOINT_UNKNOWN, CHECKPOINTS_ILL
from .illness_record import read_illness
from .manifest import Counters, FileRef, Manifest
from .pins import Roots, RootsFile
from .record_models import FrozenModel
from .slot_index import READ_WORKERS, SlotIndex, SlotSummary
from .slot_log import LineageSegment, SlotLog
from .store import Store

_MOST_SUGGESTIONS = 5  # checkpoints that the error about an ambiguous prefix names


class CheckpointCatalog:
    """The checkpoints of one pipeline."""

    def __init__(self, log: SlotLog, *, workers: int = READ_WORKERS) -> None:
        self.log = log
        self.index = SlotIndex(log, workers=workers)
        self._roots = RootsFile(log.store, log.pipeline)

    def list_checkpoints(
        self, *, all_timelines: bool = False, kinds: Iterable[str] = ("epoch",)
    ) -> list[SlotSummary]:
        """Return checkpoints of the current lineage, or of all timelines, highest slot first.

        Condemned ones are included. Only with `all_timelines` is `SlotSummary.gap` filled in.

        Args:
            all_timelines: also list the slots that are not on the current lineage.
            kinds: of slots: ``epoch`` (also a merge), ``fork`` (a restore), ``stub`` (a retired
                epoch) and ``missing`` (damage).
        """
        roots, head = self._roots.read(), self.log.head()
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
        listed = [*map(make_annotator(roots, lineage), rows)]
        if all_timelines:
            listed = self.mark_gaps(listed)
        chosen = [row for row in listed if all_timelines or row.on_lineage]
        return sorted(chosen, key=lambda row: (row.slot, row.timeline), reverse=True)

    def resolve(self, text: str, *, find_illness: IllnessFinder | None = None) -> CheckpointId:
        """Return the id of the checkpoint that a person named.

        Except for `latest_healthy` it may be condemned; by a pin or a full id also retired.

        Args:
            text: `latest`, `latest_healthy`, the name of a pin, a slot of the current lineage, a
                full id, or a prefix of an id that fits only one retained checkpoint.
            find_illness: says why a checkpoint is unhealthy; `latest_healthy` takes the newest for
                which it returns None and which is not condemned. By default the results of the
                quality runs decide.

        Raises:
            ConfigurationError: no checkpoint fits, or several do; the message names them.
        """
        if text == "latest":
            checkpoint = self.log.head().checkpoint
            if checkpoint is None:
                raise self._unknown_error(text, "nothing was sealed yet")
            return checkpoint
        if text == "latest_healthy":
            return self._find_latest_healthy(
                find_illness or build_illness_finder(self.log.store, self.log.pipeline)
            )
        pin = self._roots.read().pins.get(text)
        if pin is not None:
            return CheckpointId.parse(pin.checkpoint)
        return self._find_by_prefix(text)

    def find_gap(self, target: CheckpointId) -> int | None:
        """Return the slot of the first retired epoch that a restore to `target` would need.

        None: none. What retention has condemned counts as retired.

        A restore to an abandoned timeline applies its epochs again. A restore on the current
        lineage applies no epoch again and needs none.
        """
        # Read before the index: retention corrects the index before it clears its entries.
        return self._find_gap(target, self._roots.read().retiring_checkpoints)

    def _find_gap(self, target: CheckpointId, retiring: Collection[str]) -> int | None:
        parting = self.log.find_parting(target)
        for part in self.log.lineage(target.timeline):
            last = target.slot if part.last is None else min(part.last, target.slot)
            first = max(part.first, parting + 1)
            for row in self.index.iterate_summaries(part.timeline, first=first, last=last):
                if row.kind == "stub" or row.id in retiring:
                    return row.slot
        return None

    def mark_gaps(self, rows: list[SlotSummary]) -> list[SlotSummary]:
        """Return the rows with `gap` filled in for those that a retired epoch cuts off."""
        newest: dict[int, int] = {}
        for row in rows:
            newest[row.timeline] = max(row.slot, newest.get(row.timeline, 0))
        retiring = self._roots.read().retiring_checkpoints
        gaps = {
            timeline: self._find_gap(CheckpointId(timeline, slot, ""), retiring)
            for timeline, slot in newest.items()
        }

        def mark(row: SlotSummary) -> SlotSummary:
            gap = gaps[row.timeline]
            is_cut_off = row.kind == "epoch" and gap is not None and gap < row.slot
            return row.model_copy(update={"gap": gap}) if is_cut_off else row

        return [mark(row) for row in rows]

    def iterate_newest_first(
        self, lineage: list[LineageSegment], last: int
    ) -> Iterator[SlotSummary]:
        """Yield the slots of a lineage up to slot `last`, newest first."""
        for segment in reversed(lineage):
            if segment.first <= last:
                for row in self.index.iterate_newest_first(segment.timeline, last):
                    if segment.contains(row.slot):
                        yield row

    def read_manifest(self, checkpoint: CheckpointId) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises:
            ConfigurationError: no such checkpoint was ever completed.
            PoisonError: it was retired.
        """
        return self.log.open_checkpoint(checkpoint).epoch

    def _find_latest_healthy(self, find_illness: IllnessFinder) -> CheckpointId:
        newest_illness: str | None = None
        condemned, head = self._roots.read().condemned, self.log.head()
        for row in self.iterate_newest_first(self.log.lineage(head.timeline), head.slot):
            if row.kind != "epoch" or row.id is None or row.id in condemned:
                continue
            checkpoint = CheckpointId.parse(row.id)
            illness = find_illness(checkpoint)
            if illness is None:
                return checkpoint
            newest_illness = newest_illness or f"of the newest, {checkpoint}, {illness}"
        if newest_illness is None:
            raise self._unknown_error("latest_healthy", "every checkpoint is damaged or retired")
        raise CHECKPOINTS_ILL(pipeline=self.log.pipeline, newest=newest_illness)

    def _find_by_prefix(self, text: str) -> CheckpointId:
        if text.isdigit():  # a slot of the current lineage
            parts = self.log.lineage(self.log.head().timeline)
            part = next((one for one in parts if one.contains(int(text))), parts[-1])
            text = f"t{part.timeline}-{int(text):06d}-"
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
        shown = ", ".join(fitting[:_MOST_SUGGESTIONS]) + " ..." * (len(fitting) > _MOST_SUGGESTIONS)
        raise self._unknown_error(
            text, f"it could be {shown}" if fitting else "there is no such checkpoint or pin"
        )

    def _unknown_error(self, text: str, why: str) -> ConfigurationError:
        return CHECKPOINT_UNKNOWN(pipeline=self.log.pipeline, text=text, why=why)


def make_annotator(
    roots: Roots, lineage: list[LineageSegment]
) -> Callable[[SlotSummary], SlotSummary]:
    """Return a function that fills pins, condemnation and lineage in, and leaves most rows alone.

    Copying each of ten thousand rows would take a second.
    """
    pins: dict[str, list[str]] = {}
    for name, pin in sorted(roots.pins.items()):
        pins.setdefault(pin.checkpoint, []).append(name)
    condemned = {name: f"{one.reason}: {one.detail}" for name, one in roots.condemned.items()}
    known = {stretch.timeline: stretch for stretch in lineage}

    def annotate(row: SlotSummary) -> SlotSummary:
        stretch, change = known.get(row.timeline), JsonObject()
        if row.id in pins:
            change["pins"] = tuple(pins[row.id])
        if row.id in condemned:
            change["condemned"] = condemned[row.id]
        if stretch is None or not stretch.contains(row.slot):
            change["on_lineage"] = False
        return row.model_copy(update=change) if change else row

    return annotate


# Which checkpoints the quality runs found healthy, for `recover_to: latest_healthy`. Light: no
# pandas, no GX.

IllnessFinder = Callable[[CheckpointId], str | None]


def build_illness_finder(store: Store, pipeline: str) -> IllnessFinder:
    """Return a function that says why the quality runs find a checkpoint unhealthy; None: healthy.

    The record of ill epochs is read now; the function does not see later runs.

    A checkpoint is ill if a critical check failed for its epoch. One that no run has judged yet
    continues the state of the last judged one on its timeline. Warnings, checks over the whole past
    and checks that could not run do not count. A timeline that no run has judged is healthy.
    """
    return read_illness(store, pipeline).explain_illness


# What differs between two checkpoints: rows, frontiers, windows, tables, state, sources, spec.


class DifferingPair(FrozenModel):
    """A value of the left and of the right checkpoint; None where one of them has no such value."""

    left: Any
    right: Any


class CheckpointDiff(FrozenModel):
    """What differs between two checkpoints, `left` and `right`.

    Dictionaries leave out what is equal. Rows of state and tables are counted, not compared.

    Attributes:
        left, right: the checkpoint ids.
        same: all dictionaries are empty; the specs may still differ.
        counters: rows by disposition, right minus left; drops as ``dropped.<reason>``.
        positions: source partition -> position up to which each side has read.
        decider: entries of the decider's state (frontiers, statuses, open barriers), by their
            dotted path.
        state: kind of segment -> live rows.
        tables: table -> rows that each of the two epochs wrote.
    """

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
    change = Counter(_flatten_counters(right.counters))
    change.subtract(_flatten_counters(left.counters))
    counters = {name: rows for name, rows in sorted(change.items()) if rows}
    first, second = _list_comparable_facts(left), _list_comparable_facts(right)
    pairs = {name: _pair_differences(first[name], second[name]) for name in first}
    return CheckpointDiff(
        left=str(left.id),
        right=str(right.id),
        same=not (counters or any(pairs.values())),
        spec_changed=left.spec_digest != right.spec_digest,
        counters=counters,
        **pairs,
    )


def _list_comparable_facts(manifest: Manifest) -> dict[str, JsonObject]:
    batch = BatchNotes.from_manifest(manifest)
    return {
        # The end of each slice where the cut has one, else the whole entry.
        "positions": {
            member: part["end"] if isinstance(part, dict) and "end" in part else part
            for member, part in manifest.cut.items()
        },
        "decider": _flatten_tree(manifest.decider),
        # The objects of a job hold files of Spark; its rows are in Spark's reports.
        "state": {name: at.state_rows for name, at in batch.queries.items()}
        if batch
        else _sum_rows_by_kind(manifest.segments),
        "tables": {
            table: sum(file.rows for file in files) for table, files in manifest.files.items()
        },
    }


def _flatten_counters(counters: Counters) -> dict[str, int]:
    plain = {name: value for name, value in dict(counters).items() if isinstance(value, int)}
    return plain | {f"dropped.{reason}": count for reason, count in counters.dropped.items()}


def _pair_differences(left: JsonObject, right: JsonObject) -> dict[str, DifferingPair]:
    names = sorted({*left, *right})
    return {
        name: DifferingPair(left=left.get(name), right=right.get(name))
        for name in names
        if left.get(name) != right.get(name)
    }


def _flatten_tree(tree: JsonObject, prefix: str = "") -> JsonObject:
    """Nested dictionaries as dotted names."""
    flat: JsonObject = {}
    for name, value in tree.items():
        flat |= (
            _flatten_tree(value, f"{prefix}{name}.")
            if isinstance(value, dict) and value
            else {prefix + name: value}
        )
    return flat


def _sum_rows_by_kind(files: list[FileRef]) -> dict[str, int]:
    rows = Counter[str]()
    for file in files:
        rows[file.kind] += file.rows
    return dict(sorted(rows.items()))
