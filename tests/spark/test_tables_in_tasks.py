"""Tables as sources are read by tasks, which give what the oracle gives. No JVM is needed."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from tests.oracle.mover import OracleMover
from tests.spark.agreement import SECOND, Pair, Row, spec_of, table_of
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.engine.errors import CorruptObjectsError
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows import cut_division
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spark import python_tasks
from tidegate.jobs.spark.local_session import LocalSession
from tidegate.jobs.spec.pipeline import ReadLimits

DELTA, ICEBERG = Member("d"), Member("i")
WINDOW = {
    "kind": "tumbling",
    "size": "10s",
    "keys": ["k"],
    "aggregates": {"rows": "count(*)", "total": "sum(v)", "most": "max(n)"},
}


@pytest.fixture(autouse=True)
def use_tasks_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else reads rows, and the process stays as it is."""
    monkeypatch.setattr(python_tasks, "prepare_worker", lambda: None)


class TablePair(Pair):
    """Both movers over a Delta table `d`, partitioned by `k`, and an Iceberg table `i`."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.lake = folder / "lake"
        self.lake.mkdir(parents=True)
        address = f"sqlite:///{self.lake / 'catalog.sqlite'}"
        self.catalog = SqlCatalog("default", uri=address, warehouse=str(self.lake))
        self.catalog.create_namespace("shop")
        iceberg = {"format": "iceberg", "catalog": address, "name": "shop.i"}
        sources = {
            "d": {"path": str(self.lake / "d"), "table": {"format": "delta"}},
            "i": {"path": str(self.lake / "i"), "table": iceberg},
        }
        spec = spec_of(sources, windows={"w": WINDOW}, **more)
        self.view = InputView(LocalStore(folder / "store"), spec, folder / "view")
        session: Any = LocalSession()
        super().__init__(spec, session, folder, view=self.view)
        seen = InputView(self.store, spec, folder / "seen")
        self.sides["reference"].mover = OracleMover(seen, spec)
        self.resume: dict[Member, dict[str, Any] | None] = {DELTA: None, ICEBERG: None}

    def append(self, rows: list[Row]) -> None:
        """Append the same rows to both tables."""
        table = table_of(rows)
        deltalake.write_deltalake(str(self.lake / "d"), table, mode="append", partition_by=["k"])
        if not self.catalog.table_exists("shop.i"):
            self.catalog.create_table("shop.i", table.schema, location=str(self.lake / "i"))
        self.catalog.load_table("shop.i").append(table)

    def plan(self) -> None:
        """Plan what the tables' newest versions have added."""
        for member, resume in self.resume.items():
            source = self.spec.sources[member.source]
            reader = ObjectSource(member.source, source, self.view, pipeline="p")
            planned = reader.plan(member, resume, ReadLimits())
            assert planned.dead == ()
            self.waiting.setdefault(member, []).extend(planned.parts)
            self.resume[member] = dict(planned.resume)
            self.ordinals[member] = planned.resume["ordinal"]

    def close(self) -> None:
        """Give back what is open."""
        self.spark.close()
        self.catalog.close()


def draw_rows(draw: random.Random, around: int) -> list[Row]:
    """Rows about a time."""
    return [
        {
            "t": (around + draw.randint(-6, 8)) * SECOND,
            "kind": "data",
            "k": draw.choice(["x", "y z"]),
            "n": number,
            "v": draw.random() / 3,
        }
        for number in range(9)
    ]


@pytest.mark.parametrize(("mode", "unit_bytes"), [("ordered", 1), ("pass_through", 4 << 20)])
def test_tables_agree_with_the_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, unit_bytes: int
) -> None:
    """Appended rows come once; a compaction brings none. Partition values are columns."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", unit_bytes)
    draw = random.Random(mode)
    with closing(TablePair(tmp_path, release={"mode": mode})) as pair:
        for epoch in range(3):
            pair.append(draw_rows(draw, 8 * epoch))
            pair.append(draw_rows(draw, 8 * epoch))
            pair.plan()
            pair.run(epoch * SECOND)
            deltalake.DeltaTable(str(pair.lake / "d")).optimize.compact()
        pair.run(300 * SECOND, done=True)
        found = pair.table("events")
        late = sum(moved.counters.late for moved in pair.sides["spark"].moved)
        assert len(found) + late * (mode == "ordered") >= 2 * 3 * 18
        assert {row["k"] for row in found if row["_source"] == "d"} == {"x", "y z"}
        assert pair.table("w")


def test_a_file_that_was_vacuumed_is_named(tmp_path: Path) -> None:
    """The engine says what it is: an object that was changed behind its plan."""
    with closing(TablePair(tmp_path)) as pair:
        pair.append(draw_rows(random.Random(1), 8))
        pair.plan()
        key = pair.waiting[DELTA][0]["key"]
        (pair.lake / "d" / key.removeprefix("@d/")).unlink()
        cut = Cut((pair._slice(DELTA, done=False, blocked=False),))
        with pytest.raises(CorruptObjectsError) as caught:
            pair._survey("spark", cut)
        assert caught.value.keys == (key,)


def test_the_files_are_those_of_the_tables(tmp_path: Path) -> None:
    """Only a file in folders of partition values is decoded: it lacks their columns."""
    with closing(TablePair(tmp_path)) as pair:
        pair.append(draw_rows(random.Random(2), 8))
        pair.plan()
        for member, parts in pair.waiting.items():
            for part in parts:
                found = pair.view.local_path(part["key"])
                assert (found is None) == (member is DELTA)
                assert pa.array(sorted(part["columns"])).to_pylist() == ["k", "kind", "n", "t", "v"]
