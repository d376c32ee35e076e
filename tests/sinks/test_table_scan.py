"""The reader of tables, compared with pyiceberg's, and what it does not open."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow.fs import LocalFileSystem
from pyiceberg.table import StaticTable
from pyiceberg.types import FixedType, TimestampType, TimeType, UUIDType
from tests.sinks.conftest import World

from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.sinks import table_scan
from tidegate.jobs.sinks.iceberg_catalog import build_io_properties
from tidegate.jobs.sinks.lineage_position import read_published_cut
from tidegate.jobs.sinks.published_tables import use_plain_types
from tidegate.jobs.sinks.table_scan import TableScan

EPOCHS = 12
CARRIERS = ["aa", "a-very-long-name-of-a-carrier", "zz"]


@pytest.fixture
def addresses(world: World) -> dict[str, str]:
    """Tables with the numbers of their epochs as delays, published one epoch at a time."""
    world.values = lambda slot, rows: {
        "delay": [float(slot)] * rows,
        "carrier": [CARRIERS[slot % 3]] * rows,
        "position": [slot * rows + number for number in range(rows)],
    }
    for _ in range(EPOCHS):
        world.seal(1, ("events", "late"))
        world.sink().follow(world.log)
    cut = read_published_cut(world.store, "p")
    assert cut is not None
    return cut.tables


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data files that are opened."""
    found: list[str] = []
    read: Callable[..., Any] = TableScan._read_rows

    def count(self: TableScan, file: Any, *arguments: Any, **options: Any) -> Any:
        found.append(file["file_path"])
        return read(self, file, *arguments, **options)

    monkeypatch.setattr(TableScan, "_read_rows", count)
    return found


def _sorted(rows: pa.Table) -> list[dict[str, Any]]:
    return sorted(rows.to_pylist(), key=str)


def test_it_reads_what_pyiceberg_reads(world: World, addresses: dict[str, str]) -> None:
    """Every table has the same columns, types and rows."""
    assert len(addresses) > 2
    for address in addresses.values():
        table = StaticTable.from_metadata(address, build_io_properties(world.store))
        wanted, found = use_plain_types(table.scan().to_arrow()), TableScan(world.store, address)
        assert found.read().schema.equals(wanted.schema)
        assert _sorted(found.read()) == _sorted(wanted)
        assert found.row_count == wanted.num_rows


@pytest.mark.parametrize(
    ("ranges", "files"),
    [
        ({"_epoch": [(7, 7)]}, 1),
        ({"_epoch": [(2, 3), (11, None)]}, 4),
        ({"position": [(None, 5)]}, 2),
        ({"carrier": [("a-very-long-name-of-a-carrier",) * 2]}, 4),
        ({"carrier": [("zz", "zz")], "_epoch": [(None, 6)]}, 2),
        ({"carrier": [("b", "c")]}, 0),
    ],
)
def test_statistics_choose_the_files(
    world: World, addresses: dict[str, str], opened: list[str], ranges: Any, files: int
) -> None:
    """Only files that can have such rows are opened, and all rows within the ranges come."""
    scan = TableScan(world.store, addresses["events"])
    found = scan.read(["position"], ranges)
    assert len(opened) == files
    rows = scan.read()
    for name, bounds in ranges.items():
        within = [
            [value is not None and (low is None or low <= value) and (high is None or value <= high)
             for value in rows[name].to_pylist()]
            for low, high in bounds
        ]  # fmt: skip
        rows = rows.filter(pa.array([any(column) for column in zip(*within, strict=True)]))
    assert sorted(found["position"].to_pylist()) == sorted(rows["position"].to_pylist())


def test_a_column_that_the_table_lacks_has_no_value(
    world: World, addresses: dict[str, str], opened: list[str]
) -> None:
    """No row has the value of a column that a later spec has added."""
    found = TableScan(world.store, addresses["events"]).read(["position"], {"new": [(1, 1)]})
    assert (found.num_rows, found.column_names, opened) == (0, ["position"], [])


def test_a_renamed_column_keeps_its_values(world: World, addresses: dict[str, str]) -> None:
    """Old files have a column under its old name, files of another engine have its number."""
    table = world.sink().open_table("events")
    rows = table.scan().to_arrow().slice(0, 3)
    with table.update_schema() as update:
        update.rename_column("delay", "carrier_delay").rename_column("carrier", "airline")
    names = {"delay": "carrier_delay", "carrier": "airline"}
    table.append(rows.rename_columns([names.get(name, name) for name in rows.column_names]))
    wanted = use_plain_types(table.scan().to_arrow())
    found = TableScan(world.store, table.metadata_location)
    assert _sorted(found.read()) == _sorted(wanted)
    assert found.read(["airline"], {"airline": [("zz", "zz")]}).num_rows >= 8
    assert found.read(["carrier_delay"])["carrier_delay"].null_count == 0


def test_columns_of_other_engines_have_their_types(world: World, addresses: dict[str, str]) -> None:
    """Types that no spec can declare are read as pyiceberg reads them."""
    table = world.sink().open_table("events")
    with table.update_schema() as update:
        update.add_column("at", TimeType()).add_column("naive", TimestampType())
        update.add_column("id", UUIDType()).add_column("code", FixedType(3))
    rows = table.scan().to_arrow().slice(0, 1)
    naive = datetime(2026, 1, 1)  # noqa: DTZ001 - the column has no zone
    values = {"at": time(1, 2, 3), "naive": naive, "id": b"i" * 16, "code": b"abc"}
    for name, value in values.items():
        place = rows.schema.get_field_index(name)
        kind = rows.schema.field(name).type
        storage = pa.array([value], getattr(kind, "storage_type", kind))
        rows = rows.set_column(place, name, storage.cast(kind))
    table.append(rows)
    found = TableScan(world.store, table.metadata_location).read()
    (row,) = (row for row in found.to_pylist() if row["at"] is not None)
    assert {name: row[name] for name in values} == values


@pytest.mark.parametrize(
    ("name", "kind"),
    [("timestamp_ns", pa.timestamp("ns")), ("timestamptz_ns", pa.timestamp("ns", "UTC"))],
)
def test_nanoseconds_are_read_and_not_compared(tmp_path: Path, name: str, kind: Any) -> None:
    """The bounds of such a column count other units than ticks."""
    fields = [{"id": 1, "name": "n", "type": name}]
    file = tmp_path / "00001.metadata.json"
    file.write_text(json.dumps(METADATA | {"schemas": [{"schema-id": 0, "fields": fields}]}))
    scan = TableScan(LocalStore(tmp_path), str(file))
    assert scan.schema.field("n").type == kind
    assert scan._decoders["n"] is None


def test_deleted_rows_are_left_to_pyiceberg(
    world: World, addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With row deletes of another engine the same rows and ranges come from pyiceberg."""
    scan = TableScan(world.store, addresses["events"])
    wanted = scan.read(None, {"_epoch": [(3, 5)]})
    for manifest in scan._manifests:
        manifest["content"] = 1
    monkeypatch.setattr(TableScan, "_read_rows", None)
    assert _sorted(scan.read(None, {"_epoch": [(3, 5)]})) == _sorted(wanted)
    assert pc.min_max(wanted["_epoch"]).as_py() == {"min": 3, "max": 5}


METADATA = {
    "current-schema-id": 0,
    "schemas": [{"schema-id": 0, "fields": [{"id": 1, "name": "n", "type": "long"}]}],
    "current-snapshot-id": 7,
    "snapshots": [{"snapshot-id": 7, "summary": {"total-records": "24"}}],
}


def test_metadata_may_be_compressed(tmp_path: Path) -> None:
    """Catalogs of other engines may write it with gzip, and say so in its name."""
    packed = tmp_path / "00001.gz.metadata.json"
    packed.write_bytes(gzip.compress(json.dumps(METADATA).encode()))
    assert TableScan(LocalStore(tmp_path), str(packed)).row_count == 24


def test_tables_may_be_in_another_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalog decides where its tables are; Arrow knows more file systems than two."""
    file = tmp_path / "00001.metadata.json"
    file.write_text(json.dumps(METADATA))

    class Files:
        """The local files, by addresses of Google's cloud."""

        @staticmethod
        def from_uri(address: str) -> Any:
            """Return the local files and the path."""
            return LocalFileSystem(), address.removeprefix("gs:/")

    monkeypatch.setattr(table_scan, "FileSystem", Files)
    assert TableScan(LocalStore(tmp_path), f"gs:/{file}").row_count == 24


def test_reading_tables_needs_no_slow_import() -> None:
    """What `tidegate row` imports: no pyiceberg, SQLAlchemy, pandas or PySpark."""
    code = (
        "import sys, tidegate.jobs.splice.row_trace, tidegate.jobs.cli.page_results;"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    slow = {"pyiceberg", "sqlalchemy", "pandas", "pyspark", "pyarrow.dataset"}
    assert slow & set(done.stdout.split()) == set()
    assert table_scan.__name__ in done.stdout.split()


def test_a_driver_imports_no_sql_for_a_catalog_in_the_bucket() -> None:
    """SQLAlchemy would take a fifth of what a driver imports, each time it is launched."""
    code = "import tidegate.jobs.driver.__main__, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"sqlalchemy", "pyiceberg.catalog.rest", "pyspark"} & {*done.stdout.split()}
