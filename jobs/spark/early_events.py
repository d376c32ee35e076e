"""Lets the tasks that read rows write the events at once, where their positions can be foretold.

Positions of events are contiguous, so a task has to know how many rows before its own leave. A plan
knows how many rows it reads, and without an order all of them leave, but for dead letters, for what
`where`, rules, punctuation or `max_jump` set aside, and for offsets of a topic without a message.
Where nothing of this happened in the last epochs, the positions are taken from the plan, and a
second job is spared. If some rows do not leave after all, the epoch is read again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tidegate.jobs.rows.cut_division import ReadUnit
from tidegate.jobs.rows.event_files import assign_first_positions, list_event_members
from tidegate.jobs.rows.slice_scan import MOST_CELLS
from tidegate.jobs.rows.unit_reading import ReadOrder, UnitAnswer
from tidegate.jobs.spec.event_time_options import ReleaseMode
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.source_spec import SourceSpec

WHOLE_EPOCHS: Final = 4
"""After so many epochs whose planned rows have all left, the next one is expected to be like them.

One that is not is read twice, which costs more than a second job in each of the others.
"""
_MOST_FOOTER_BYTES: Final = 2 << 20
"""What the answers of tasks may have of footers, besides partial aggregates (`SENT_BYTES`)."""
_FOOTER_BYTES: Final = 256
"""Of a footer for each column, about."""


class EarlyEvents:
    """Foretells the positions of the events of a pipeline."""

    def __init__(self, spec: PipelineSpec) -> None:
        self._spec = spec
        sources = spec.sources.values()
        # Of sections and tardy barriers the driver learns from the rows.
        self._is_possible = (
            spec.outputs.events
            and spec.release.mode is ReleaseMode.PASS_THROUGH
            and all(source.barriers is None for source in sources)
        )
        self._whole_epochs = WHOLE_EPOCHS if all(map(_is_whole_at_first, sources)) else 0

    def plan_positions(self, units: list[ReadUnit], first: int | None) -> list[ReadUnit]:
        """Return units with the positions of their rows, or as they are if these are not foretold.

        Args:
            units: of the cut.
            first: position of the first event; None if it is not known.
        """
        if first is None or not self._is_possible or self._whole_epochs < WHOLE_EPOCHS:
            return units
        files = sum(1 + unit.count_cells(self._spec) // MOST_CELLS for unit in units)
        if files * len(self._spec.row_columns) * _FOOTER_BYTES > _MOST_FOOTER_BYTES:
            return units
        members = {
            index: member
            for unit in units
            for index, member in list_event_members(self._spec, unit).items()
        }
        rows = {unit.number: unit.count_rows() for unit in units}
        positions = assign_first_positions(members, rows, first)
        return [replace(unit, positions=positions[unit.number]) for unit in units]

    def note_epoch(self, units: Sequence[ReadUnit], answers: Sequence[UnitAnswer]) -> None:
        """Learn from an epoch; one without rows says nothing."""
        if units:
            self._whole_epochs = self._whole_epochs + 1 if have_left(units, answers) else 0


def _is_whole_at_first(source: SourceSpec) -> bool:
    """Whether all rows of a source may be expected to leave before any was read.

    A row of Parquet is seldom a dead letter.
    """
    judged = source.has_conditions, source.punctuation, source.max_jump
    return source.format == "parquet" and source.kafka is None and not any(judged)


def have_left(units: Sequence[ReadUnit], answers: Sequence[UnitAnswer]) -> bool:
    """Whether all planned rows leave."""
    return all(
        answer.kept is not None and answer.kept.rows == unit.count_rows()
        for unit, answer in zip(units, answers, strict=True)
    )


def keep_rows(units: Sequence[ReadUnit]) -> list[ReadUnit]:
    """Return units whose tasks keep the rows for a second job."""
    return [replace(unit, positions=None) for unit in units]


def have_positions(units: Sequence[ReadUnit]) -> bool:
    """Whether the tasks of these units write the events."""
    return any(unit.positions is not None for unit in units)


def has_kept_rows(order: ReadOrder, units: Sequence[ReadUnit]) -> bool:
    """Whether the tasks of these units keep rows for a second job."""
    return order.spec.outputs.events and not (order.gone or have_positions(units))
