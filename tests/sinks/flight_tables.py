"""Tables of flights with a layout, written by hand and published."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

from pyiceberg.table import StaticTable, Table
from tests.sinks.conftest import World, make_spec

from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.sinks.lineage_position import read_published_cut
from tidegate.jobs.sinks.published_tables import (
    read_table,
)

COLUMNS = {
    "t": "timestamp",
    "carrier": "string",
    "delay": "double",
    "day": "date",
    "price": "decimal(9,2)",
    "n": "long",
    "ok": "boolean",
    "raw": "binary",
}
START = dt.datetime(2024, 2, 28, tzinfo=dt.UTC)
LAYOUT = {
    "events": {"partition_by": ["day(t)", "bucket(4, carrier)"], "sort_by": ["carrier", "t desc"]}
}


def flights(slot: int, rows: int) -> dict[str, list[Any]]:
    """Rows over three days, some values missing."""
    times = [START + dt.timedelta(hours=7 * (n + slot) % 72, seconds=n) for n in range(rows)]
    return {
        "t": times,
        "carrier": [None if n % 7 == 3 else f"C{(n * slot) % 5}" for n in range(rows)],
        "delay": [None if n % 5 == 4 else n / 2 for n in range(rows)],
        "day": [time.date() for time in times],
        "price": [Decimal(n * 25) / 100 for n in range(rows)],
        "n": [slot * 100 + n for n in range(rows)],
        "ok": [n % 3 == 0 for n in range(rows)],
        "raw": [bytes([n]) for n in range(rows)],
        "types": [["cut", "end"]] * rows,
        "missing": [[]] * rows,
        "barrier_id": list(range(rows)),
        "position": [slot * 1000 + n for n in range(rows)],
    }


def make_world(folder: Path, **outputs: Any) -> World:
    """A world with rows that differ."""
    return World(
        LocalStore(folder / "store"), folder / "work", make_spec(COLUMNS, outputs=outputs), flights
    )


def content(world: World, table: str = "events") -> list[dict[str, Any]]:
    """The rows that readers find, in an order of their own."""
    rows = read_table(world.spec, world.store, table).to_pylist()
    return sorted(rows, key=lambda row: (row["_timeline"], row["_epoch"], row.get("n") or 0))


def published(world: World, table: str = "events") -> StaticTable:
    """What the readers' pointer names."""
    current = read_published_cut(world.store, "p")
    assert current is not None
    return StaticTable.from_metadata(current.tables[table])


def paths(table: Table, **scan: Any) -> set[str]:
    """The files that a scan opens."""
    return {task.file.file_path for task in table.scan(**scan).plan_files()}
