"""``python -m tests.checkpoints.bench_seal``.

How long a seal takes against a local MinIO, and how many requests an epoch makes.

The real engine and log with the oracle mover: an epoch of a few rows after the other. The seal
is one conditional PUT of the manifest, with the check of the lease before it; the PUTs of data
objects are counted apart.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median, quantiles
from unittest.mock import patch

from tests.engine.harness import Bench, row, spec_of
from tests.servers.minio import running

from tidegate.checkpoints.manifest import ForkRecord, Manifest
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import Sealed, SlotLog, SlotTaken


def measure(url: str, epochs: int) -> tuple[list[float], Counter[str]]:
    """Milliseconds of each seal, and PUTs by kind."""
    store, seals, puts = open_store(url), list[float](), Counter[str]()
    bench, seal = Bench(spec_of(), store), SlotLog.seal

    def timed(log: SlotLog, record: Manifest | ForkRecord) -> Sealed | SlotTaken:
        begun = time.perf_counter()
        outcome = seal(log, record)
        seals.append(1000 * (time.perf_counter() - begun))
        return outcome

    def counted(name: str) -> None:
        send = getattr(store, name)

        def sent(key: str, *given: object) -> str:
            puts["slot" if "/slots/" in key else "data"] += 1
            return str(send(key, *given))

        setattr(store, name, sent)

    for name in ("put", "create", "swap"):
        counted(name)
    with patch.object(SlotLog, "seal", timed):
        engine = bench.engine()
        for number in range(epochs):
            for source in bench.sources.values():
                source.append(*(row(20 * number + second) for second in range(8)))
            engine.run_epoch()
    return seals, puts


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=300)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tidegate-seal-") as name,
        running(Path(name), "bench") as minio,
    ):
        os.environ |= minio.environment()
        seals, puts = measure("s3://bench/seal", given.epochs)
    cuts = quantiles(seals, n=100)
    print(
        f"{len(seals)} seals: p50 {median(seals):.1f} ms, p95 {cuts[94]:.1f} ms, max"
        f" {max(seals):.1f} ms"
    )
    print(
        f"PUTs per epoch: {puts['slot'] / len(seals):.2f} of slots, {puts['data'] / len(seals):.2f}"
        " of data objects"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
