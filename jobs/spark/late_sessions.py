"""Rows that came after their session was purged, in epochs whose rows are read by tasks.

Whether a session is purged depends on rows of other units and on live sessions, so the driver finds
that out from items. In most epochs there is no such row. If there is one, tasks read its unit again
and write the late rows of the unit, those of all outputs, so that each row is counted once.
"""

from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa

from tidegate.jobs.rows.session_folds import select_rows_of_parts
from tidegate.jobs.rows.topic_reading import build_settings_variable
from tidegate.jobs.rows.unit_reading import UnitAnswer, decode_table, encode_table
from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import DuckFrame
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.window_specs import WindowKind

from .epoch_context import EpochContext
from .errors import SPARK_FAILED
from .python_tasks import run_read_job
from .session_windows import find_gone_parts
from .task_epochs import TaskScans, check_answers


def read_late_rows(
    epoch: EpochContext, scans: TaskScans, partials: Mapping[str, pa.Table | None]
) -> TaskScans:
    """What tasks found, with the rows that are late because their session is purged.

    `partials` are those of each window, of all units.

    Raises:
        TidegateError: an object has changed, or the store does not answer.
        PoisonError: DuckDB could not compute it.
    """
    spec, gone = epoch.spec, dict[str, pa.Table]()
    for name, window in spec.windows.items():
        items = partials[name]
        if window.kind is WindowKind.SESSION and items is not None:
            found = find_gone_parts(epoch, name, items)
            if found is not None:
                gone[name] = found
    if not gone:
        return scans
    places = [i for i, answer in enumerate(scans.answers) if _has_rows_of(spec, answer, gone)]
    # The tasks of a job are numbered from 0.
    units = [replace(scans.units[place], number=number) for number, place in enumerate(places)]
    packed = {name: encode_table(parts) for name, parts in gone.items()}
    order = replace(scans.order, gone=packed)
    again, _ = run_read_job(epoch.sessions, order, units, build_settings_variable(spec))
    left = check_answers(again)
    if left is not None:
        raise SPARK_FAILED(pipeline=spec.name, cause=left)
    answers = list(scans.answers)
    for place, answer in zip(places, again, strict=True):
        answers[place] = _replace_late_rows(answers[place], answer)
    return replace(scans, answers=answers)


def _has_rows_of(spec: PipelineSpec, answer: UnitAnswer, gone: Mapping[str, pa.Table]) -> bool:
    """Whether a unit has rows of one of the keys and parts."""
    for name, parts in gone.items():
        if name not in answer.partials:
            continue
        items = DuckFrame.from_table(decode_table(answer.partials[name]))
        aggregation, frame = Aggregation(spec, name), DuckFrame.from_table(parts)
        if select_rows_of_parts(items, aggregation, frame, ["_ws"]).limit(1).toArrow().num_rows:
            return True
    return False


def _replace_late_rows(answer: UnitAnswer, again: UnitAnswer) -> UnitAnswer:
    return replace(
        answer,
        late_files=again.late_files,
        late=again.late,
        late_counts=again.late_counts,
        late_refused=again.late_refused,
    )
