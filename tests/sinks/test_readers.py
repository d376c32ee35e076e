"""The tables as other programs read them: pandas and DuckDB from the metadata file alone, Spark through the catalog."""

from __future__ import annotations

import subprocess
import sys

import duckdb
import pytest
from pyiceberg.table import StaticTable
from tests.sinks.conftest import World

from tidegate.checkpoints.local import LocalStore
from tidegate.infra.kafka import ensure_jars
from tidegate.jobs.sinks.pointer import read_current
from tidegate.jobs.spec.errors import TransientError

ARTIFACTS = ("org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0", "org.xerial:sqlite-jdbc:3.50.3.0")
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
    current = read_current(published.store, "p")
    assert current is not None
    table = StaticTable.from_metadata(current.tables["events"])
    frame = table.scan().to_pandas()
    assert sorted(frame["_epoch"]) == [1, 1, 2, 2, 3, 3]
    assert sorted(set(frame["_timeline"])) == [0, 1]
    with duckdb.connect() as db:
        table.scan().to_duckdb("events", connection=db)
        assert db.sql("select _epoch, count(*) from events group by all order by all").fetchall() == [(1, 2), (2, 2), (3, 2)]


@pytest.mark.slow
@pytest.mark.e2e
def test_spark(published: World) -> None:
    """Spark reads the same rows by the SQL catalog that tidegate publishes to."""
    try:
        jars = ensure_jars("iceberg-spark", ARTIFACTS)
    except TransientError as error:
        pytest.skip(f"no registry with Iceberg's jars: {error.message}")
    assert isinstance(published.store, LocalStore)
    database = published.store.root / ".tidegate-store" / "catalog.sqlite"
    where = [",".join(map(str, jars)), str(database), str(published.store.root)]
    done = subprocess.run([sys.executable, "-c", READER, *where], capture_output=True, text=True, timeout=240, check=False)
    assert "FOUND [(1, 2), (2, 2), (3, 2)]" in done.stdout, done.stderr[-3000:]
