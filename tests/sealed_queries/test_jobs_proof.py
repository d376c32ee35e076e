"""Applications, killed and restored, with a real Spark."""

from __future__ import annotations

import random
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest

from tests.sealed_queries.apps import APPS, Clicks
from tests.sealed_queries.fake_checkpoint import FakeCheckpoint
from tests.sealed_queries.jobs_proof import prove_combination
from tests.sealed_queries.rig import COMBINATIONS, KilledJob
from tidegate.checkpoints.batch_notes import BatchReport, SinkRewind
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.jobs.sealed_queries.batch_objects import QueryObjects
from tidegate.jobs.sealed_queries.batch_sealer import BatchSealer, JobAuthor, SealedQuery

_IN_CI = ("clicks", "rocksdb-2")


def test_the_proof_waits_for_no_batch_without_rows(tmp_path: Path) -> None:
    """Spark runs it only in the start that ran the batch before, so after a restore it may never come."""
    job = KilledJob(tmp_path / "job", {}, Clicks, 2)
    store, sealed = job.log.store, list[Manifest]()
    lease = Lease.acquire(store, "clicks", ProcessIdentity.this_process())
    sealer = BatchSealer(job.log, lease, JobAuthor("uid", "digest", "here"), sealed.append)
    for name in Clicks.queries:
        made = FakeCheckpoint(tmp_path / name)
        objects = QueryObjects(store, name)
        query = SealedQuery(name, made.folder, objects, SinkRewind.REPEAT, "a sink", None)
        for batch in range(2):
            assert not job.is_complete()
            made.commit(batch)
            sealer.seal(query, batch, BatchReport())
    assert job.is_complete()
    assert job.list_targets() == [one.id for one in sealed[:-1]]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("app", "name"),
    [
        pytest.param(*pair, marks=() if pair == _IN_CI else pytest.mark.long)
        for pair in product(APPS, COMBINATIONS)
    ],
)
def test_kills_and_restores_do_not_show_in_the_sinks(app: str, name: str, tmp_path: Path) -> None:
    """Each batch holds the rows of the undisturbed run, for each kind of state."""
    dice = random.Random(name)
    with ExitStack() as resources:
        APPS[app].prepare(tmp_path / "server", resources)
        counts = prove_combination(tmp_path, name, 1, 1, dice, app=APPS[app], files=4)
    assert counts == (1, 1, 0)
