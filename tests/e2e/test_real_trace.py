"""The judge of real runs: it takes what a bucket has kept, and rejects a history with a hole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.real_kills import run_real_kills
from tests.e2e.real_trace import (
    Tables,
    forge_histories,
    keep_versions,
    read_changes,
    take_changes,
)
from tests.engine.harness import Bench, row, spec_of
from tests.servers.minio import RealMinio, running
from tests.simulation.protocol_trace import UntakenError
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.s3_store import S3Store
from tidegate.jobs.driver.housekeeping import make_retention
from tidegate.jobs.sinks.iceberg_sink import IcebergSink


def _run_epochs(bench: Bench, sink: IcebergSink, first: int, count: int) -> None:
    engine = bench.engine()
    for number in range(first, first + count):
        for source in bench.sources.values():
            source.append(row(10 * number), row(10 * number + 3))
        engine.run_epoch()
        sink.follow(bench.log)


def _run_pipeline(minio: RealMinio) -> None:
    """Six epochs, a restore between them, and retention of what is left behind."""
    bench = Bench(spec_of(), S3Store(minio.settings()))
    sink = IcebergSink(bench.spec, bench.store, "uid")
    _run_epochs(bench, sink, 0, 4)
    lease = Lease.acquire(bench.store, "p", ProcessIdentity.this_process())
    target = next(slot.id for slot in bench.epochs() if slot.slot == 2)
    plan = plan_restore(bench.log, target)
    commit_restore(bench.log, lease, plan, request_id="r", who="ann", why="")
    lease.release()
    sink.follow(bench.log)
    _run_epochs(bench, sink, 4, 2)
    retention = make_retention(bench.spec, bench.log, keep_for=0.0, grace=0.0)
    retention.run()
    bench.store.close()


@pytest.mark.minio
def test_the_steps_of_a_real_bucket_are_taken(tmp_path: Path) -> None:
    """Epochs, tables, pointer, restore and retention; not so if one is lost or early."""
    with running(tmp_path, "trace") as minio:
        keep_versions(minio)
        _run_pipeline(minio)
        changes = read_changes(minio, "")
        tables = Tables(minio, "")
        judge = take_changes(changes, "p", tables)
        assert len(judge.protocol.slots) == 7
        assert judge.protocol.timeline == 1
        assert judge.protocol.pointer == judge.protocol.head()
        assert set(judge.protocol.tables) >= {"checkpoints", "events"}
        for history in forge_histories(changes, judge.protocol).values():
            with pytest.raises(UntakenError):
                take_changes(history, "p", tables)


# In CI, `test_chaos.py` judges the steps of killed drivers, and the test above rejects forged ones.
@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.slow
def test_the_steps_of_killed_drivers_are_taken() -> None:
    """Drivers and maintenance killed at random, one restore: the tables hold each row once."""
    found = run_real_kills(5, seed=0)
    assert found.problems == []
    assert found.steps["fork"] == found.restores == 1
    # One planted bug may change nothing in so short a history, such as a `roots.json` that is
    # written again before anything is retired.
    assert len([bug for bug, seen in found.forgeries.items() if not seen]) <= 1
