"""A worker that has no memory left refuses its slice by name."""

from __future__ import annotations

import io
from collections.abc import Iterator
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
from tidegate.jobs.rules.worker_memory import OutOfRoomError, WorkerMemory
from tidegate.jobs.sources import object_decoding

GIGABYTE = 1 << 30


def test_a_worker_without_memory_names_its_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a refusal: neither a failed task nor rows that Spark SQL shall compute."""
    monkeypatch.setattr(worker_memory, "_memory", WorkerMemory(1 << 20, counts_shared=True))
    store, spec = LocalStore(tmp_path), spec_of({"a": {}}, windows={"w": WINDOW})
    (unit,) = divide_cut(spec, Cut((slice_of(store, Member("a"), rows_at(1, 2)),)), {}, store)
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
    monkeypatch.setattr(slice_reading, "LARGE_READ", 1)
    slice_reading._require_room_for_groups(footer, range(2), ["v"])
    sizes = [footer.row_group(group).column(0).total_uncompressed_size for group in range(2)]
    assert asked == [sum(sizes)]


def test_duckdb_has_the_room_that_is_left_and_spills_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it a query ends with an error that `MEMORY_ERRORS` has."""
    monkeypatch.setattr(worker_memory, "_memory", WorkerMemory(1 << 20, counts_shared=True))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker_memory, "_LEAST_ROOM", 64 << 20)
    engine = duck_frame._RenewedEngine(duck_frame._Purpose.FRAMES)
    many = "select count(*) from (select range, count(*) from range(3000000) group by 1)"
    with pytest.raises(duck_frame.MEMORY_ERRORS) as failed:
        engine.open_session().sql(many).fetchall()
    assert isinstance(failed.value, duckdb.OutOfMemoryException)
    monkeypatch.setattr(worker_memory, "_LEAST_ROOM", GIGABYTE)  # memory was given back meanwhile
    assert engine.open_session().sql(many).fetchall() == [(3_000_000,)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("used", "wanted", "is_refused"),
    [
        (GIGABYTE // 2, 0, False),
        (GIGABYTE, 0, True),
        (GIGABYTE // 2, GIGABYTE // 4, False),
        (GIGABYTE // 2, GIGABYTE // 2, True),
    ],
)
def test_what_a_worker_could_not_do_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, used: int, wanted: int, is_refused: bool
) -> None:
    """Other workers of the executor do not count: they may have ended by the next try."""
    memory = WorkerMemory(GIGABYTE, counts_shared=True)
    monkeypatch.setattr(memory, "measure", lambda: used)
    if is_refused:
        with pytest.raises(OutOfRoomError):
            memory.require_room(wanted)
    else:
        memory.require_room(wanted)


def test_what_shares_memory_counts_once_without_yarn() -> None:
    """YARN counts it for each process."""
    found = [WorkerMemory(GIGABYTE, counts_shared=shared).measure() for shared in (True, False)]
    assert found[0] > found[1] > 0


@pytest.mark.parametrize("version", [0, 1])
def test_a_control_group_limits_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Without a limit below the host's memory nothing is looked at, and YARN's word goes first."""
    files = (tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes")
    monkeypatch.setattr(worker_memory, "_GROUP_LIMITS", files)
    monkeypatch.setattr(worker_memory, "_memory", None)
    for text in (None, "max\n", f"{1 << 60}\n"):
        if text is not None:
            files[version].write_text(text)
        worker_memory.watch_memory(None)
        assert worker_memory.get_worker_memory() is None
    files[version].write_text(f"{GIGABYTE}\n")
    worker_memory.watch_memory(None)
    memory = worker_memory.get_worker_memory()
    assert memory is not None
    assert memory.limit == int(0.95 * GIGABYTE)
    worker_memory.watch_memory(2 * GIGABYTE)
    memory = worker_memory.get_worker_memory()
    assert memory is not None
    assert memory.limit == int(0.95 * 2 * GIGABYTE)
    worker_memory.watch_memory(0)
    assert worker_memory.get_worker_memory() is None


def test_memory_that_is_short_is_no_fault_of_an_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead letter would take its rows away."""
    store, spec = LocalStore(tmp_path), spec_of({"a": {}}, windows={"w": WINDOW})
    (unit,) = divide_cut(spec, Cut((slice_of(store, Member("a"), rows_at(1, 2)),)), {}, store)

    def fail(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    monkeypatch.setattr(slice_reading, "open_parquet_file", fail)
    answer = read_unit(order_of(spec, store), unit).answer
    assert answer.corrupt == ()
    assert answer.error is not None
    assert answer.error.code == "rows.no_memory"

    def run_out(*_: object) -> Iterator[pa.Table]:
        raise duckdb.OutOfMemoryException("63.6 MiB/64.0 MiB used")

    with pytest.raises(duckdb.OutOfMemoryException):
        list(
            object_decoding._decode_object("a.json", io.BytesIO(b"{}"), spec.sources["a"], run_out)
        )
