"""Lets the tasks that read rows write the events at once, where their positions can be foretold.

Positions of events are contiguous, so a task has to know how many rows before its own leave. A plan
knows how many rows it reads, and without an order all of them leave, but for dead letters, for what
`where`, rules or punctuation set aside, and for offsets of a topic that have no message. Where
nothing of this happened in the last epochs, the positions are taken from the plan, and a second job
is spared. If some rows do not leave after all, the epoch is read again, and its files are garbage.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tidegate.jobs.rows.cut_division import ReadUnit
from tidegate.jobs.rows.event_files import assign_first_positions, list_event_members
from tidegate.jobs.rows.unit_reading import UnitAnswer
from tidegate.jobs.spec.event_time_options import ReleaseMode
from tidegate.jobs.spec.pipeline import PipelineSpec

WHOLE_EPOCHS: Final = 4
"""After so many epochs whose planned rows have all left, the next one is expected to be like them.

One that is not is read twice, which costs more than a second job in each of the others.
"""


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
        is_filtered = any(source.has_conditions or source.punctuation for source in sources)
        self._whole_epochs = 0 if is_filtered else WHOLE_EPOCHS

    def plan_positions(self, units: list[ReadUnit], first: int | None) -> list[ReadUnit]:
        """Return units with the positions of their rows, or as they are if these are not foretold.

        Args:
            units: of the cut.
            first: position of the first event; None if it is not known.
        """
        if first is None or not self._is_possible or self._whole_epochs < WHOLE_EPOCHS:
            return units
        members = {
            index: member
            for unit in units
            for index, member in list_event_members(self._spec, unit).items()
        }
        rows = {unit.number: unit.count_rows() for unit in units}
        positions = assign_first_positions(members, rows, first)
        return [replace(unit, positions=positions[unit.number]) for unit in units]

    def note_answers(self, units: Sequence[ReadUnit], answers: Sequence[UnitAnswer]) -> bool:
        """Learn from an epoch, and return whether all its planned rows have left."""
        is_whole = all(
            answer.kept is not None and answer.kept.rows == unit.count_rows()
            for unit, answer in zip(units, answers, strict=True)
        )
        self._whole_epochs = self._whole_epochs + 1 if is_whole else 0
        return is_whole


def keep_rows(units: Sequence[ReadUnit]) -> list[ReadUnit]:
    """Return units whose tasks keep the rows for a second job."""
    return [replace(unit, positions=None) for unit in units]


def have_positions(units: Sequence[ReadUnit]) -> bool:
    """Whether the tasks of these units write the events."""
    return any(unit.positions is not None for unit in units)


def are_rows_kept(spec: PipelineSpec, units: Sequence[ReadUnit]) -> bool:
    """Whether the tasks of these units keep rows for a second job."""
    return spec.outputs.events and not have_positions(units)
