"""Applications, killed and restored, with a real Spark."""

from __future__ import annotations

import random
import subprocess
import threading
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import BinaryIO
from unittest.mock import MagicMock

import pytest

from tests.sealed_queries.apps import APPS, Clicks, Join, Windows
from tests.sealed_queries.fake_checkpoint import FakeCheckpoint
from tests.sealed_queries.jobs_proof import prove_combination
from tests.sealed_queries.rig import COMBINATIONS, KilledJob
from tidegate.checkpoints.batch_notes import BatchReport, SinkRewind
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.jobs.sealed_queries.batch_objects import QueryObjects
from tidegate.jobs.sealed_queries.batch_sealer import BatchSealer, JobAuthor, SealedQuery
from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts


def test_the_proof_waits_for_no_batch_without_rows(tmp_path: Path) -> None:
    """Spark runs it only in the start that ran the batch before, so after a restore it may never come."""
    job = KilledJob(tmp_path / "job", {}, Clicks, 2)
    store, sealed = job.log.store, list[Manifest]()
    lease = Lease.acquire(store, "clicks", ProcessIdentity.this_process())
    sealer = BatchSealer(job.log, lease, JobAuthor("uid", "digest", "here"), sealed.append)
    for name in Clicks.queries:
        made = FakeCheckpoint(tmp_path / name)
        objects = QueryObjects(store, name)
        query = SealedQuery(name, made.host, objects, SinkRewind.REPEAT, WriterFacts())
        for batch in range(2):
            assert not job.is_complete()
            made.commit(batch)
            sealer.seal(query, batch, BatchReport())
    assert job.is_complete()
    assert job.list_targets() == [one.id for one in sealed[:-1]]


def test_the_proof_stops_no_driver_without_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped while it waits for the lease, as behind an outage, does not end with 0."""
    job = KilledJob(tmp_path / "job", {}, Clicks, 0)  # without input, which is complete
    driver, store, tokens = MagicMock(), job.log.store, list[int]()

    def end(timeout: float) -> int:
        tokens.append(job.token())
        return 0

    driver.poll.return_value, driver.wait.side_effect = None, end
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: driver)
    job.launch()
    takes = (store, "clicks", ProcessIdentity.this_process())
    late = threading.Timer(0.5, Lease.acquire, takes)
    late.start()
    job.run_to_end_of_input()
    late.join()
    assert tokens == [1]


def test_the_proof_launches_a_driver_again_that_had_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own launch tells so; one that ends with another error is not launched again."""
    job, ends = KilledJob(tmp_path / "job", {}, Clicks, 1), ["job.worker_late", "job.no_query"]

    def start(*_given: object, stdout: BinaryIO, **_more: object) -> MagicMock:
        stdout.write(f'{{"code": "{ends.pop(0)}"}}\n'.encode())
        return MagicMock(poll=lambda: 3)

    monkeypatch.setattr(subprocess, "Popen", start)
    job.launch()
    with pytest.raises(AssertionError, match=r"no_query"):
        job.wait(lambda: False)
    assert not ends


def test_the_proof_ends_when_two_files_are_one_batch() -> None:
    """A kill before Spark plans a batch has the next batch read two files: no batch has number 1."""
    second = {"end": '{"logOffset": 1}'}
    cut = {f"{query}/0": second for query in Clicks.queries}
    assert Clicks.count_files(MagicMock(cut=cut)) == 2
    assert Clicks.count_files(MagicMock(cut={**cut, "per_minute/0": {"end": None}})) == 0
    assert Clicks.count_files(MagicMock(cut={"enriched/0": second})) == 0
    assert Windows.count_files(MagicMock(cut={"windows/0": {"end": '{"topic": {"0": 119}}'}})) == 1
    assert Join.count_files(None) == 0


# In CI, `test_jobs_matrix.py`, `test_bucket_jobs.py` and `test_jobs_airflow.py` kill and restore jobs.
@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("app", "name"), list(product(APPS, COMBINATIONS)))
def test_kills_and_restores_do_not_show_in_the_sinks(app: str, name: str, tmp_path: Path) -> None:
    """The sinks hold the rows of the undisturbed run, for each kind of state."""
    dice = random.Random(name)
    with ExitStack() as resources:
        APPS[app].prepare(tmp_path / "server", resources)
        counts = prove_combination(tmp_path, name, 1, 1, dice, app=APPS[app], files=4)
    assert counts == (1, 1, 0)
