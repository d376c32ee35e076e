"""Rows that came after their session was purged, in epochs whose rows are read by tasks.

Whether a session is purged depends on rows of other units and on live sessions, so the driver finds
that out from items. In most epochs there is no such row. If there is one, tasks read its unit again
and write the late rows of the unit, those of all outputs, so that each row is counted once.
"""

from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa
from pyspark.sql import SparkSession

from tidegate.jobs.rows.session_folds import select_rows_of_parts
from tidegate.jobs.rows.stored_partials import StoredTable, decode_table, encode_table
from tidegate.jobs.rows.unit_reading import UnitAnswer
from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import DuckFrame
from tidegate.jobs.rules.row_conditions import window_purged_sql

from .task_epochs import TaskScans, check_answers, read_units


def read_late_rows(
    session: SparkSession, scans: TaskScans, gone: Mapping[str, pa.Table]
) -> TaskScans:
    """What tasks found, with the rows that are late because their session is purged.

    `gone` are their keys and parts, as `StateMerging.find_gone_parts` has them.

    Raises:
        TidegateError: an object has changed, or the store does not answer.
        PoisonError: a task could not compute it.
    """
    if not gone:
        return scans
    spec = scans.order.spec
    places = [i for i, answer in enumerate(scans.answers) if _has_rows_of(scans, answer, gone)]
    # The tasks of a job are numbered from 0.
    units = [replace(scans.units[place], number=number) for number, place in enumerate(places)]
    packed = {name: encode_table(parts) for name, parts in gone.items()}
    order = replace(scans.order, gone=packed)
    again, _ = read_units(session, spec, order, units)
    check_answers(spec, again)
    answers = list(scans.answers)
    for place, answer in zip(places, again, strict=True):
        known = answers[place]
        answers[place] = replace(
            known,
            footers=known.footers | answer.footers,
            late=answer.late,
            late_refused=answer.late_refused,
        )
    return replace(scans, answers=answers)


def _has_rows_of(scans: TaskScans, answer: UnitAnswer, gone: Mapping[str, pa.Table]) -> bool:
    """Whether a unit has rows of one of the keys and parts."""
    for name, parts in gone.items():
        if name not in answer.partials:
            continue
        packed = answer.partials[name]
        if isinstance(packed, StoredTable):
            return True  # to read its rows again costs no more than to fetch the table
        aggregation = Aggregation(scans.order.spec, name)
        items = DuckFrame.from_table(decode_table(packed))
        # Few are.
        purged = window_purged_sql(aggregation.window, "_we", scans.order.frontier)
        frame = DuckFrame.from_table(parts)
        found = select_rows_of_parts(items.where(purged), aggregation, frame, ["_ws"])
        if found.limit(1).toArrow().num_rows:
            return True
    return False
