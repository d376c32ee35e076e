"""A job's log on a store in memory, and a sealer of its batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sealed_queries.fake_checkpoint import FakeCheckpoint
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.batch_notes import SinkRewind
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.sealed_queries.batch_objects import QueryObjects
from tidegate.jobs.sealed_queries.batch_sealer import BatchSealer, JobAuthor, SealedQuery
from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts


class JobBench:
    """Fake queries below a folder, whose batches are sealed into one log."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, MemoryStore()
        self.log = SlotLog(self.store, "clicks")
        self.lease = Lease.acquire(self.store, "clicks", ProcessIdentity.this_process())
        self.sealed: list[Manifest] = []
        self.sealer = self.make_sealer()

    def make_sealer(self) -> BatchSealer:
        """A sealer that goes on after the head of the log, as of a new launch."""
        author = JobAuthor("uid", "digest", "host:/folder")
        return BatchSealer(self.log, self.lease, author, self.sealed.append)

    def query(
        self, name: str, rewind: SinkRewind = SinkRewind.REPEAT, partitions: int = 2
    ) -> tuple[SealedQuery, FakeCheckpoint]:
        """A query, and the checkpoint that its Spark writes."""
        made = FakeCheckpoint(self.folder / name, partitions)
        objects = QueryObjects(self.store, name)
        return SealedQuery(name, made.host, objects, rewind, WriterFacts()), made


@pytest.fixture
def bench(tmp_path: Path) -> JobBench:
    return JobBench(tmp_path)
