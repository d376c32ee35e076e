"""Built events by the kernel, against the oracle: of one file and of several, epoch by epoch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.oracle.glom import Group, Left, build
from tests.rows.units import FOLDERS
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import NotFoundError
from tidegate.jobs.engine.arrow_tables import TIMESTAMP_UTC
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.rows.attempt_files import store_task_rows
from tidegate.jobs.rows.built_events import (
    BuildOrder,
    EventGroup,
    split_into_groups,
    write_built_events,
)
from tidegate.jobs.spec.event_time_options import GlomOptions


def write_events(store: LocalStore, rows: list[Left]) -> FileRef:
    """A file of the events table."""
    columns = {
        "section": pa.array([row.section for row in rows], pa.int64()),
        "t": pa.array([row.time for row in rows], TIMESTAMP_UTC),
    }
    return store_task_rows(store.url, pa.table(columns), "events", "table:events", "t", {})


def order_of(
    store: LocalStore,
    options: dict[str, Any],
    files: list[FileRef],
    group: EventGroup,
    mark: ReleaseMark,
    *,
    position: int = 0,
    flagged: int = 0,
) -> BuildOrder:
    """What the task of an epoch gets."""
    found = GlomOptions.model_validate(options)
    return BuildOrder(found, "t", FOLDERS, store.url, tuple(files), position, flagged, group, mark)


def read_groups(path: Path) -> list[dict[str, Any]]:
    """A file of built events, with ticks as times."""
    table = pq.read_table(path).drop_columns(["_timeline", "_epoch"])
    fields = [pa.field(name, pa.int64()) for name in table.column_names]
    return list(table.cast(pa.schema(fields)).to_pylist())


@pytest.mark.parametrize("seed", range(8))
def test_groups_are_those_of_the_oracle(tmp_path: Path, seed: int) -> None:
    """Of several sections and files, beside late rows that leave at once."""
    draw, store = random.Random(seed), LocalStore(tmp_path)
    stamp = draw.choice(["earliest", "latest", "mean"])
    options = {"dt": "3us", "max_rows": draw.choice([1, 2, 5, 1000]), "stamp": stamp}
    glom = GlomOptions.model_validate(options)
    group, wanted, position, last = EventGroup(), Group(), 0, ReleaseMark(0, 0)
    for _ in range(6):
        flagged, rows = draw.choice([0, 0, 2]), list[Left]()
        for number in range(draw.choice([0, 3, 9])):
            section = last.section + draw.choice([0, 0, 0, 0, 1])
            start = 0 if section > last.section else last.time
            last = ReleaseMark(section, start + draw.choice([0, 1, 2, 5]))
            rows.append(Left(*last, position + flagged + number))
        late = [Left(0, 99, position + number) for number in range(flagged)]
        place, files, left = 0, list[FileRef](), [*late, *rows]
        while place < len(left):
            end = place + draw.randint(1, 6)
            files.append(write_events(store, left[place:end]))
            place = end
        mark = ReleaseMark(last.section, last.time + draw.choice([0, 1, 9]))
        order = order_of(store, options, files, group, mark, position=position, flagged=flagged)
        answer = write_built_events(order)
        ended, wanted = build(wanted, rows, glom, mark)
        found = [row for file in answer.files for row in read_groups(tmp_path / file.key)]
        assert found == [one.row(glom) for one in ended]
        group, position = answer.group, position + len(left)
        assert (group.number, group.rows) == (wanted.number, len(wanted.times))


def test_a_file_that_is_gone_is_an_answer(tmp_path: Path) -> None:
    """So that Spark does not run the task again."""
    store = LocalStore(tmp_path)
    ref = write_events(store, [Left(0, 1, 0)])
    store.delete(ref.key)
    order = order_of(store, {"dt": "3us"}, [ref], EventGroup(), ReleaseMark(0, 9))
    answer = write_built_events(order)
    assert isinstance(answer.error, NotFoundError)
    assert not answer.files


def test_a_group_that_is_larger_than_a_new_limit_ends_at_once() -> None:
    """It was left open when the spec allowed more rows; each row behind it is in one group."""
    options = GlomOptions.model_validate({"dt": "1h", "max_rows": 5})
    grown = EventGroup(0, 0, 0, 17, 0, 16)
    times = np.arange(17, 29)
    groups = list(split_into_groups(grown, np.zeros(12, np.int64), times, 17, options))
    assert [(one.rows, one.first_position) for one in groups] == [
        (17, 0),
        (5, 17),
        (5, 22),
        (2, 27),
    ]
