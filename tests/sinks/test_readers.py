"""The tables as other programs read them.

Pandas and DuckDB from the metadata file alone, Spark through the catalog.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import date
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import StaticTable
from tests.servers.jars import ensure_jars
from tests.sinks.conftest import World, make_spec
from tests.sinks.flight_tables import COLUMNS, flights
from tests.sinks.flight_tables import published as arranged

from tidegate.checkpoints.local_store import LocalStore
from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sinks.lineage_position import read_published_cut
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.sinks.table_maintenance import compact_tables
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits

ARTIFACTS = (
    "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",
    "org.xerial:sqlite-jdbc:3.50.3.0",
)
READER = """
import sys
from pyspark.sql import SparkSession
jars, database, warehouse = sys.argv[1:]
catalog = {
    "": "org.apache.iceberg.spark.SparkCatalog",
    ".catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
    ".io-impl": "org.apache.iceberg.hadoop.HadoopFileIO",
    ".uri": "jdbc:sqlite:" + database,
    ".warehouse": warehouse,
}
builder = SparkSession.builder.master("local[1]").config("spark.jars", jars).config("spark.ui.enabled", "false")
for name, value in catalog.items():
    builder = builder.config("spark.sql.catalog.tidegate" + name, value)
spark = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
rows = spark.sql("SELECT _epoch, count(*) AS n FROM tidegate.p.events GROUP BY _epoch ORDER BY _epoch").collect()
print("FOUND", [(row._epoch, row.n) for row in rows])
day = "t >= TIMESTAMP '2024-02-29 00:00:00Z' AND t < TIMESTAMP '2024-03-01 00:00:00Z'"
rows = spark.sql("SELECT n FROM tidegate.p.late WHERE carrier = 'C1' AND " + day + " ORDER BY n").collect()
files = spark.sql("SELECT count(DISTINCT `partition`) FROM tidegate.p.late.files").collect()
print("ARRANGED", [row.n for row in rows], files[0][0])
spark.stop()
"""


@pytest.fixture
def published(world: World) -> World:
    """Three epochs, the last of them on another timeline."""
    sink = world.sink()
    target = world.seal(2, ("events", "hourly")).id
    world.seal(1)
    sink.follow(world.log)
    world.fork(target)
    world.seal(1)
    sink.follow(world.log)
    return world


def test_pandas_and_duckdb(published: World) -> None:
    """The pointer names a table's metadata file; that is all a reader needs."""
    current = read_published_cut(published.store, "p")
    assert current is not None
    table = StaticTable.from_metadata(current.tables["events"])
    frame = table.scan().to_pandas()
    assert sorted(frame["_epoch"]) == [1, 1, 2, 2, 3, 3]
    assert sorted(set(frame["_timeline"])) == [0, 1]
    with duckdb.connect() as db:
        table.scan().to_duckdb("events", connection=db)
        assert db.sql(
            "select _epoch, count(*) from events group by all order by all"
        ).fetchall() == [(1, 2), (2, 2), (3, 2)]


@pytest.mark.slow
@pytest.mark.e2e
def test_spark(published: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark reads the same rows by the SQL catalog that tidegate publishes to, also partitioned,
    sorted and merged ones.
    """
    try:
        jars = ensure_jars("iceberg-spark", ARTIFACTS)
    except TransientError as error:
        pytest.skip(f"no registry with Iceberg's jars: {error.message}")
    monkeypatch.setattr("tidegate.jobs.sinks.table_maintenance._NEWEST_SLOTS_KEPT", 1)
    monkeypatch.setattr("tidegate.jobs.sinks.table_maintenance._MIN_FILES_PER_MERGE", 2)
    layout = {"late": {"partition_by": ["bucket(4, carrier)", "day(t)"], "sort_by": ["n desc"]}}
    published.spec, published.values = make_spec(COLUMNS, outputs={"layout": layout}), flights
    published.seal(3, ("late",), rows=20)
    published.sink().follow(published.log)
    done = compact_tables(published.spec, published.store)["late"]
    assert done.after < done.before
    late = read_table(published.spec, published.store, "late").to_pylist()
    wanted = sorted(
        row["n"] for row in late if row["carrier"] == "C1" and row["t"].date() == date(2024, 2, 29)
    )
    partitions = len(
        {
            (task.file.partition[0], task.file.partition[1])
            for task in arranged(published, "late").scan().plan_files()
        }
    )
    assert isinstance(published.store, LocalStore)
    database = published.store.root / ".tidegate-store" / "catalog.sqlite"
    where = [",".join(map(str, jars)), str(database), str(published.store.root)]
    read = subprocess.run(
        [sys.executable, "-c", READER, *where],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "FOUND [(1, 2), (2, 2), (3, 2)]" in read.stdout, read.stderr[-3000:]
    assert wanted
    assert f"ARRANGED {wanted} {partitions}" in read.stdout, read.stdout[-3000:]


def test_another_pipeline_reads_a_table(world: World, tmp_path: Path) -> None:
    """As a source, whose path is the folder of the pipeline that writes the table."""
    world.values = lambda slot, rows: {"carrier": [f"c{slot}"] * rows}
    sink = world.sink()
    world.seal(3)
    sink.follow(world.log)
    assert isinstance(world.store, LocalStore)
    catalog = f"sqlite:///{world.store.root}/.tidegate-store/catalog.sqlite"
    name = ".".join(sink.open_table("events").name())
    table = {"format": "iceberg", "catalog": catalog, "name": name}
    source = {
        "path": f"{world.store.root}/p",
        "table": {**table, "catalog_options": {"name": "tidegate"}},
        "schema": {"t": "timestamp", "carrier": "string"},
        "event_time": "t",
        "lag": "1s",
    }
    reader = PipelineSpec.model_validate({"name": "q", "sources": {"events": source}})
    view = InputView(LocalStore(tmp_path / "other"), reader, tmp_path / "scratch")
    whole = ObjectSource("events", reader.sources["events"], view, pipeline="q")
    found = [
        value
        for part in whole.plan(Member("events"), None, ReadLimits()).parts
        for value in pq.read_table(pa.BufferReader(view.get(part["key"]).data))[
            "carrier"
        ].to_pylist()
    ]
    assert sorted(found) == ["c1", "c1", "c2", "c2", "c3", "c3"]
    outside = reader.sources["events"].model_copy(update={"path": f"{world.store.root}/p/iceberg"})
    reader = reader.model_copy(update={"sources": {"events": outside}})
    view = InputView(LocalStore(tmp_path / "third"), reader, tmp_path / "scratch")
    part = ObjectSource("events", outside, view, pipeline="q")
    with pytest.raises(ConfigurationError, match="let it be a folder above all its files"):
        part.plan(Member("events"), None, ReadLimits())
