"""Sealed rows with values that Python's own types cannot hold reach the tables and the sinks."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from tests.sinks.conftest import World, make_spec

from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.engine.arrow_tables import TIMESTAMP_UTC
from tidegate.jobs.sinks.published_tables import read_table

FAR, BEFORE = 1_764_331_200_000_000_000, -62_135_596_800_000_001
COLUMNS = {"t": "timestamp", "x": "timestamp", "d": "date"}


@pytest.mark.parametrize(("time", "day"), [(FAR, 2_932_897), (BEFORE, -719_163)])
def test_a_time_outside_the_calendar_is_published(tmp_path: Path, time: int, day: int) -> None:
    """The epoch and those behind it are in the table, with the value as it was."""

    def values(slot: int, rows: int) -> dict[str, list[object]]:
        times = pa.array([time if slot == 1 else 0] * rows, pa.int64()).cast(TIMESTAMP_UTC)
        days = pa.array([day if slot == 1 else 0] * rows, pa.int32()).cast(pa.date32())
        return {"x": times, "d": days}

    world = World(LocalStore(tmp_path / "store"), tmp_path / "work", make_spec(COLUMNS), values)
    world.seal(2)
    world.sink().follow(world.log)
    found = read_table(world.spec, world.store, "events")
    assert found["x"].cast(pa.int64()).to_pylist() == [time, time, 0, 0]
    assert found["d"].cast(pa.int32()).to_pylist() == [day, day, 0, 0]


def test_far_values_are_texts_in_python_and_json() -> None:
    """No time, no list of times and no text that is not UTF-8 stops who reads rows one by one."""
    # Not at the top: `make faults` runs the other tests on code without these names.
    from tidegate.jobs.engine.arrow_tables import list_rows
    from tidegate.jobs.sinks.published_tables import to_json_lines

    times = pa.array([FAR, BEFORE, 0, None], pa.int64()).cast(TIMESTAMP_UTC)
    offsets = pa.array([0, 1, 2, 3, 4], pa.int32())
    days = pa.array([2_932_897, -719_163, 0, None], pa.int32()).cast(pa.date32())
    odd = pa.array([b"caf\xe9", b"a", b"b", None]).view(pa.string())
    lists = pa.ListArray.from_arrays(offsets, times)
    table = pa.table({"t": times, "d": days, "l": lists, "s": odd})
    rows = list_rows(table)
    assert [str(row["t"])[:5] for row in rows] == ["+5787", "+0000", "1970-", "None"]
    assert rows[0]["d"] == "+10000-01-01"
    assert rows[0]["l"] == [rows[0]["t"]]
    assert [row["s"] for row in rows] == ["caf\ufffd", "a", "b", None]
    assert len([json.loads(line) for line in to_json_lines(table).splitlines()]) == 4
