"""``python -m tests.checkpoints.bench_recovery``.

From the start of a driver to its first survey, against state and history.

On a real MinIO, without Spark: a JVM takes as long whatever lies in the bucket, and starts
meanwhile; surveys read the cut only. Measured is all that a driver does before it: probe the store,
take the lease, read the head, verify it (presence and size of every segment), plan. Segments are
real objects of 8 MB, each in the folder of the epoch that wrote it, with small ones that it
replaced beside it; history is real slots.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from tests.engine.harness import PlainSteps, row, spec_of
from tests.oracle.memory_source import MemorySource
from tests.servers.minio import running

from tidegate.checkpoints.bucket_layout import (
    BucketLayout,
    CheckpointId,
    generate_attempt_id,
)
from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Counters, FileRef, Manifest
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.pipeline_identity import ProcessIdentity, ensure_identity
from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.checkpoints.store import Store
from tidegate.checkpoints.store_probe import require_honest_store
from tidegate.jobs.driver.startup import select_start_checkpoint
from tidegate.jobs.engine.epoch_engine import Engine, EngineRuntime, EpochPorts
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult, NoFaults, SurveyedCut
from tidegate.jobs.engine.manifest_writer import ManifestAuthor
from tidegate.jobs.eventtime.decider import create_initial_state

SPEC = spec_of()
SEGMENT = 8_000_000  # bytes; what compaction leaves alone
REPLACED = 3  # small segments beside each live one: garbage that retention has not swept yet
THREADS = 8


class _SurveyedError(Exception):
    """The first survey was asked for."""


class _Stop:
    """A mover that tells when it is needed."""

    def survey(self, cut: Cut, state: Mapping[str, Any], *_: Any) -> SurveyedCut:
        raise _SurveyedError

    def move(self, order: MoveOrder, surveyed: SurveyedCut) -> MoveResult:
        raise AssertionError("the run ends at its first survey")

    def close(self) -> None:
        """Nothing to give back."""


def fill(store: Store, state: int, history: int) -> None:
    """Slots 1 to `history`; the newest has `state` bytes of segments."""
    layout, block = BucketLayout("p"), os.urandom(SEGMENT)
    digest, newest = sha256_of_bytes(block), CheckpointId(0, history, generate_attempt_id())

    def segment(number: int) -> FileRef:
        folder = layout.state_prefix(CheckpointId(0, 1 + number, generate_attempt_id()))
        key = f"{folder}order.parquet"
        store.put(key, block)
        for small in range(REPLACED):
            store.put(f"{folder}small-{small}.parquet", block[:1000])
        return FileRef(key=key, rows=1, bytes=SEGMENT, sha256=digest, kind="order")

    with ThreadPoolExecutor(THREADS) as pool:
        segments = list(pool.map(segment, range(max(1, state // SEGMENT))))
    records, head = [], LogHead(0, 0, None, None, None)
    for slot in range(1, history + 1):
        record = _epoch(
            head,
            newest.attempt if slot == history else generate_attempt_id(),
            segments if slot == history else [],
        )
        head = LogHead(0, slot, record, sha256_of_bytes(record.to_bytes()), None)
        records.append(record)
    with ThreadPoolExecutor(THREADS) as pool:
        list(
            pool.map(
                lambda record: store.create(layout.slot_key(0, record.slot), record.to_bytes()),
                records,
            )
        )


def _epoch(head: LogHead, attempt: str, segments: list[FileRef]) -> Manifest:
    return Manifest(
        pipeline="p",
        uid="",
        spec_digest=SPEC.digest(),
        code_version="0",
        timeline=0,
        slot=head.next_slot,
        parent=str(head.checkpoint) if head.checkpoint else None,
        parent_sha256=head.sha256,
        attempt=attempt,
        lease_token=1,
        driver="bench",
        recorded_now=0,
        decider=create_initial_state(SPEC),
        counters=Counters(),
        segments=segments,
        notes={"next_position": 0},
        created_at=0,
    )


def recover(url: str) -> float:
    """Seconds from nothing to the first survey."""
    sources = {name: MemorySource(name) for name in SPEC.sources}
    sources["a"].append(row(1))
    begun = time.perf_counter()
    store = open_store(url)
    require_honest_store(store)
    uid = ensure_identity(store, "p")
    lease = Lease.acquire(store, "p", ProcessIdentity.this_process(), uid=uid)
    log = SlotLog(store, "p")
    select_start_checkpoint(SPEC, log, lease, "latest")
    engine = Engine(
        SPEC,
        log,
        EpochPorts(list(sources.values()), _Stop(), lambda order: {}),
        EngineRuntime(
            ManifestAuthor(uid, "bench", "0"), PlainSteps(SYSTEM_CLOCK), SYSTEM_CLOCK, NoFaults()
        ),
    )
    try:
        engine.run_epoch()
    except _SurveyedError:
        seconds = time.perf_counter() - begun
    lease.release()
    store.close()
    return seconds


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--epochs", type=int, nargs="*", default=[10, 10_000])
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tidegate-recovery-") as name,
        running(Path(name), "bench") as minio,
    ):
        os.environ |= minio.environment()
        print(f"{'state MB':>9} {'epochs':>7} {'median s':>9} {'best s':>7} {'worst s':>8}")
        cases = [(mb, given.epochs[0]) for mb in given.megabytes] + [
            (given.megabytes[0], n) for n in given.epochs[1:]
        ]
        for megabytes, epochs in cases:
            url = f"s3://bench/{megabytes}-{epochs}"
            fill(open_store(url), megabytes * 1_000_000, epochs)
            runs = [recover(url) for _ in range(given.runs)]
            print(
                f"{megabytes:>9,} {epochs:>7,} {median(runs):>9.3f} {min(runs):>7.3f}"
                f" {max(runs):>8.3f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
