"""A real cluster whose hosts do not see the driver's disk.

Tasks read and write the bucket, and the tables are exact.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.drivers import Piped, wait_for
from tests.servers.minio import RealMinio, running
from tests.servers.spark import Cluster, can_hide, standalone

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not can_hide(), reason="this user may not give a process a disk of its own"),
]

BUCKET = "apart"
ROWS = 150_000  # an object's: a window has more keys than the driver merges by itself
OBJECTS = 3
START = datetime(2026, 3, 1, tzinfo=UTC)
SPEC = """\
apiVersion: tidegate/v1
name: wide
sources:
  all:
    path: inbox/all/
    schema: {{at: timestamp, item: long, amount: long}}
    event_time: at
    lag: 10m
    limits: {{objects: 1}}
    bounded: true
release: {{mode: ordered}}
windows:
  per_minute: {{kind: tumbling, size: 1m, keys: [item], aggregates: {{n: count(*), total: sum(amount)}}}}
checkpoint: {{idle_interval: 100ms}}
spark:
  master: {master}
  driver_memory: 1g
  conf: {{spark.cores.max: "2", spark.executor.memory: 1g}}
"""


@pytest.fixture
def minio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealMinio]:
    """A MinIO with its address in the environment."""
    with running(tmp_path, BUCKET) as found:
        for key, value in found.environment().items():
            monkeypatch.setenv(key, value)
        yield found


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two workers that see the driver's scratch folder empty."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    with standalone(tmp_path, 2, cores=1, hidden=tmp_path / "scratch") as found:
        yield found


def feed(piped: Piped) -> Path:
    """Write the objects into the bucket; the folder that holds the same files."""
    dice, folder = np.random.default_rng(7), piped.folder / "input"
    folder.mkdir()
    for number in range(OBJECTS):
        at = np.sort(dice.integers(0, 300, ROWS)) + 300 * number - dice.integers(0, 60, ROWS)
        times = [START + timedelta(seconds=int(second)) for second in at]
        columns = {
            "at": pa.array(times, pa.timestamp("us", "UTC")),
            "item": dice.integers(0, 90_000, ROWS),
            "amount": at,
        }
        pq.write_table(pa.table(columns), folder / f"{number:05d}.parquet")
        piped.store().upload(folder / f"{number:05d}.parquet", f"inbox/all/{number:05d}.parquet")
    piped.store().put("inbox/all/_DONE", b"")
    return folder


def test_hosts_without_the_drivers_disk(minio: RealMinio, cluster: Cluster, tmp_path: Path) -> None:
    """Objects, segments and tables are read and written there, without Hadoop's S3A.

    A worker dies on the way; nothing is left behind there.
    """
    piped = Piped(
        tmp_path / "wide",
        SPEC.format(master=cluster.master),
        f"s3://{minio.bucket}/far",
    )
    folder = feed(piped)
    driver = piped.start()
    wait_for(lambda: piped.log().head().slot >= 1, driver)
    cluster.kill_worker(0)
    assert driver.wait(timeout=900) == 0, piped.log_text()
    with duckdb.connect() as db:
        db.execute("set timezone = 'UTC'")
        db.register("events", piped.table("events"))
        db.register("found", piped.table("per_minute"))
        db.execute(f"create view input as select * from '{folder}/*.parquet'")
        windows = (
            "time_bucket(interval '1 minute', \"at\") as w, count(*) as n, sum(amount)::bigint as"
            " total"
        )
        wanted = f"select item, {windows} from input group by all"
        columns = "select item, window_start, n, total from found"
        assert db.sql(f"({wanted}) except ({columns})").fetchall() == []
        assert (
            db.sql("select count(*) from found").fetchall()
            == db.sql(f"select count(*) from ({wanted})").fetchall()
        )
        assert (
            db.sql(
                'select "at", item, amount from input except all select "at", item, amount from'
                " events"
            ).fetchall()
            == []
        )
        assert db.sql("select count(*), count(distinct position) from events").fetchall() == [
            (ROWS * OBJECTS,) * 2
        ]
    assert [entry.key for entry in piped.store().list_objects("wide/staging/")] == []


def test_hosts_without_tidegate_are_refused_before_anything_is_read(
    minio: RealMinio, cluster: Cluster, tmp_path: Path
) -> None:
    """The error names what they lack, and how to bring it."""
    piped = Piped(tmp_path / "wide", SPEC.format(master=cluster.master), f"s3://{minio.bucket}/far")
    bare = str(Path(sys.base_prefix) / "bin" / "python3")
    assert piped.run(environment={"PYSPARK_PYTHON": bare}) == 2, piped.log_text()
    assert "Python workers cannot run tidegate" in piped.log_text()
    assert "tidegate pack" in piped.log_text()
