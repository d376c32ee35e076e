"""A worker that has no memory left refuses its slice by name."""

from __future__ import annotations

import os
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.rows.units import WINDOW, order_of, rows_at, slice_of
from tests.spark.agreement import spec_of
from tidegate.checkpoints.local_store import LocalStore
from tidegate.errors import PoisonError
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows import slice_reading
from tidegate.jobs.rows.cut_division import divide_cut
from tidegate.jobs.rows.unit_reading import read_unit
from tidegate.jobs.rules import duck_frame, worker_memory
from tidegate.jobs.rules.worker_memory import MemoryUse, OutOfRoomError, WorkerMemory

GIGABYTE = 1 << 30


def test_a_worker_without_memory_names_its_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a refusal: neither a failed task nor rows that Spark SQL shall compute."""
    monkeypatch.setattr(worker_memory, "_memory", WorkerMemory(1 << 20))
    store, spec = LocalStore(tmp_path), spec_of({"a": {}}, windows={"w": WINDOW})
    (unit,) = divide_cut(Cut((slice_of(store, Member("a"), rows_at(1, 2)),)), {}, store)
    answer = read_unit(order_of(spec, store), unit).answer
    assert isinstance(answer.error, PoisonError)
    assert (answer.error.code, answer.left) == ("rows.no_memory", None)
    assert "a/0: inbox/a/0.parquet rows 0 to 2" in answer.error.message
    assert "of 0 MB" in answer.error.message


def test_large_columns_are_asked_for_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The footer has their sizes; columns that are not read do not count, nor do small reads."""
    asked = list[int]()
    monkeypatch.setattr(slice_reading, "require_room", asked.append)
    values = np.random.default_rng(1).random(10_000)
    pq.write_table(pa.table({"v": values, "w": values}), tmp_path / "f", row_group_size=5_000)
    footer = pq.read_metadata(tmp_path / "f")
    slice_reading._require_room_for_groups(footer, range(2), ["v"])
    assert asked == []
    monkeypatch.setattr(slice_reading, "_LARGE_READ", 1)
    slice_reading._require_room_for_groups(footer, range(2), ["v"])
    sizes = [footer.row_group(group).column(0).total_uncompressed_size for group in range(2)]
    assert asked == [sum(sizes)]


def test_duckdb_has_the_room_that_is_left_and_spills_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it a query ends with an error that `MEMORY_ERRORS` has."""
    monkeypatch.setattr(worker_memory, "_memory", WorkerMemory(1 << 20))
    monkeypatch.chdir(tmp_path)
    engine = duck_frame._start_engine(duck_frame._Purpose.FRAMES)
    assert engine.sql("select count(*) from range(1000)").fetchall() == [(1000,)]
    with pytest.raises(duck_frame.MEMORY_ERRORS) as failed:
        engine.sql(
            "select count(*) from (select range, count(*) from range(3000000) group by 1)"
        ).fetchall()
    assert isinstance(failed.value, duckdb.OutOfMemoryException)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("use", "wanted", "is_refused"),
    [
        (MemoryUse(total=GIGABYTE // 2, workers=300, mine=200, count=2), 0, False),
        (MemoryUse(total=GIGABYTE, workers=300, mine=200, count=2), 0, True),
        (MemoryUse(total=GIGABYTE, workers=300, mine=100, count=2), 0, False),
        (MemoryUse(total=GIGABYTE // 2, workers=300, mine=300, count=1), GIGABYTE // 2, True),
    ],
)
def test_the_worker_that_uses_most_is_refused(
    monkeypatch: pytest.MonkeyPatch, use: MemoryUse, wanted: int, is_refused: bool
) -> None:
    """Of two in one container the smaller one goes on."""
    memory = WorkerMemory(GIGABYTE)
    monkeypatch.setattr(memory, "measure", lambda: use)
    if is_refused:
        with pytest.raises(OutOfRoomError):
            memory.require_room(wanted)
    else:
        memory.require_room(wanted)


def test_what_shares_memory_counts_once_without_yarn() -> None:
    """YARN counts it for each process."""
    assert WorkerMemory(GIGABYTE).measure().mine > WorkerMemory(None).measure().mine > 0
    use = WorkerMemory(None).measure()
    assert use.total >= use.workers >= use.mine
    assert os.getpid() in worker_memory._list_children(os.getppid())


def test_a_control_group_limits_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit there is the host's memory."""
    monkeypatch.setattr(worker_memory, "_GROUP_LIMIT", tmp_path / "memory.max")
    host = WorkerMemory(None).limit
    assert host > 0
    (tmp_path / "memory.max").write_text("max\n")
    assert WorkerMemory(None).limit == host
    (tmp_path / "memory.max").write_text(f"{1 << 20}\n")
    assert WorkerMemory(None).limit == int(0.95 * (1 << 20))
