"""Lets the tasks that read rows write the events at once, where their positions can be foretold.

Positions of events are contiguous, so a task has to know how many rows before its own leave. A plan
knows how many rows it reads, and without an order all of them leave, but for dead letters, for what
`where`, rules, punctuation or `max_jump` set aside, and for offsets of a topic without a message.
Where nothing of this happened in the last epochs, the positions are taken from the plan, and a
second job is spared. If some rows do not leave after all, the epoch is read again. So it is if rows
are so long that tasks hold few of them: the files would be small, and a second job joins rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tidegate.jobs.rows.cut_division import ReadUnit
from tidegate.jobs.rows.event_files import (
    FILE_BYTES,
    assign_first_positions,
    list_event_members,
)
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
_MORE_COLUMNS: Final = 10
"""Columns that events have besides those of rows, and what else is said of a file."""
_VALUE_BYTES: Final = 16
"""Of a value in memory, about; files of events are bounded by them (`FILE_BYTES`)."""


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
        values = (unit.count_cells(self._spec) for unit in units)
        files = sum(1 + number * _VALUE_BYTES // FILE_BYTES for number in values)
        columns = len(self._spec.row_columns) + _MORE_COLUMNS
        if files * columns * _FOOTER_BYTES > _MOST_FOOTER_BYTES:
            return units
        slices = (pair for unit in units for pair in unit.list_slices())
        members = list_event_members(self._spec, slices)
        rows = {unit.number: unit.count_rows() for unit in units}
        positions = assign_first_positions(members, rows, first)
        return [replace(unit, positions=positions[unit.number]) for unit in units]

    def note_epoch(self, units: Sequence[ReadUnit], answers: Sequence[UnitAnswer]) -> None:
        """Learn from an epoch; one without rows says nothing."""
        if any(answer.most_rows is not None for answer in answers):
            self._is_possible = False  # rows with long values will come again
        if units:
            self._whole_epochs = self._whole_epochs + 1 if have_left(units, answers) else 0


def _is_whole_at_first(source: SourceSpec) -> bool:
    """Whether all rows of a source may be expected to leave before any was read.

    A row of Parquet is seldom a dead letter.
    """
    judged = source.has_conditions, source.punctuation, source.max_jump
    return source.format == "parquet" and source.kafka is None and not any(judged)


def have_left(units: Sequence[ReadUnit], answers: Sequence[UnitAnswer]) -> bool:
    """Whether all planned rows leave, and are written where tasks should write them."""
    return all(
        answer.kept is not None
        and answer.kept.rows == unit.count_rows()
        and (unit.positions is None or answer.most_rows is None)
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
