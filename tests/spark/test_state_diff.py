"""Two sealed batches of real queries, compared by Spark's state reader."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import count, expr

from tests.sealed_queries.conftest import JobBench
from tests.sealed_queries.rig import COMBINATIONS
from tidegate.checkpoints.batch_notes import BatchReport, SinkRewind
from tidegate.errors import ConfigurationError
from tidegate.jobs.sealed_queries.batch_objects import QueryObjects
from tidegate.jobs.sealed_queries.batch_sealer import SealedQuery
from tidegate.jobs.sealed_queries.checkpoint_folder import HostFolder
from tidegate.jobs.sealed_queries.state_diff import OperatorDifference, compare_states
from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts

pytestmark = pytest.mark.spark

_FILES = (
    [("2026-01-01T00:00:00.000001Z", "ann"), ("2026-01-01T00:00:01Z", "bob")],
    [("2026-01-01T00:00:00.000002Z", "ann"), ("2026-01-01T00:00:02Z", "cid")],
)


@pytest.fixture
def own_session(session: SparkSession) -> SparkSession:
    """Its settings are not those of other tests."""
    own = session.newSession()
    own.conf.set("spark.sql.shuffle.partitions", "2")
    return own


@pytest.fixture
def bench(tmp_path: Path) -> JobBench:
    return JobBench(tmp_path)


def _run(session: SparkSession, folder: Path, name: str, kind: str) -> Path:
    """Run a query over two files, a batch each, with one kind of state; return its checkpoint."""
    (folder / "in").mkdir(exist_ok=True)
    for number, rows in enumerate(_FILES):
        path = folder / "in" / f"{number}.json"
        path.write_text("\n".join(json.dumps({"at": at, "who": who}) for at, who in rows))
        os.utime(path, (1_700_000_000 + number,) * 2)
    for key, value in COMBINATIONS[kind].items():
        session.conf.set(key, value)

    def read() -> DataFrame:
        clicks = session.readStream.schema("at timestamp, who string")
        files = clicks.option("maxFilesPerTrigger", 1).json(str(folder / "in"))
        return files.withWatermark("at", "1 hour")

    if name == "counts":
        frame, mode = read().groupBy("who").agg(count("*").alias("n")), "update"
    else:
        left, right = (read().selectExpr(f"at {s}_at", f"who {s}_who") for s in "lr")
        near = expr("l_who = r_who AND l_at BETWEEN r_at - INTERVAL 1 HOUR AND r_at")
        frame, mode = left.join(right, near), "append"
    checkpoint = folder / f"{name}-{kind}"
    writer = frame.writeStream.queryName(name).format("noop").outputMode(mode)
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    assert writer.start().awaitTermination(120)
    return checkpoint


def _seal(bench: JobBench, name: str, checkpoint: Path) -> None:
    objects = QueryObjects(bench.store, name)
    query = SealedQuery(name, HostFolder(checkpoint), objects, SinkRewind.REPEAT, WriterFacts())
    for batch in range(2):
        assert bench.sealer.seal(query, batch, BatchReport())


def _diff(session: SparkSession, bench: JobBench, *slots: int) -> list[OperatorDifference]:
    left, right = (bench.sealed[slot] for slot in slots)
    return list(compare_states(session, bench.store, left, right, examples=1))


@pytest.mark.parametrize("kind", ["hdfs-1", pytest.param("rocksdb-2", marks=pytest.mark.slow)])
def test_keys_that_come_go_and_change(
    own_session: SparkSession, bench: JobBench, tmp_path: Path, kind: str
) -> None:
    """Counted in both directions, with a bounded number of examples."""
    _seal(bench, "counts", _run(own_session, tmp_path, "counts", kind))
    (there,), (back,) = _diff(own_session, bench, 0, 1), _diff(own_session, bench, 1, 0)
    assert (there.query, there.operator, there.part) == ("counts", "0 stateStoreSave", None)
    assert (there.added, there.removed, there.changed) == (1, 0, 1)
    assert (back.added, back.removed, back.changed) == (0, 1, 1)
    found: list[tuple[Any, ...]] = [
        (one.change, one.key, one.left, one.right) for one in there.examples
    ]
    assert found == [
        ("added", '{"who":"cid"}', None, '{"count":1}'),
        ("changed", '{"who":"ann"}', '{"count":1}', '{"count":2}'),
    ]
    assert _diff(own_session, bench, 1, 1) == []


@pytest.mark.slow
def test_the_sides_of_a_join(own_session: SparkSession, bench: JobBench, tmp_path: Path) -> None:
    """Each is a part; a key with another row has changed, also if only a microsecond differs."""
    _seal(bench, "pairs", _run(own_session, tmp_path, "pairs", "hdfs-1"))
    found = _diff(own_session, bench, 0, 1)
    assert [(one.operator, one.part) for one in found] == [
        ("0 symmetricHashJoin", "left"),
        ("0 symmetricHashJoin", "right"),
    ]
    for one in found:
        assert (one.added, one.removed, one.changed) == (1, 0, 1)
        changed = one.examples[1]
        assert changed.left is not None
        assert changed.right is not None
        assert "00:00:00.000001" in changed.left
        assert "00:00:00.000002" in changed.right


def test_a_query_that_one_side_lacks(
    own_session: SparkSession, bench: JobBench, tmp_path: Path
) -> None:
    """All its keys have come."""
    checkpoint = _run(own_session, tmp_path, "counts", "hdfs-1")
    _seal(bench, "first", checkpoint)
    _seal(bench, "second", checkpoint)
    (found,) = _diff(own_session, bench, 1, 3)
    assert (found.query, found.added, found.removed, found.changed) == ("second", 3, 0, 0)


def test_a_state_that_spark_cannot_read(
    own_session: SparkSession, bench: JobBench, tmp_path: Path
) -> None:
    """The error names the query; nothing is called equal."""
    checkpoint = _run(own_session, tmp_path, "counts", "hdfs-1")
    (checkpoint / "state/0/_metadata/metadata").unlink()
    _seal(bench, "counts", checkpoint)
    with pytest.raises(ConfigurationError, match=r"state of query counts: .*does not describe"):
        _diff(own_session, bench, 0, 1)
