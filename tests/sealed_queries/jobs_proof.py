"""Kills and restores of jobs, drawn by a seed: `make jobs-proof KILLS=3 RESTORES=3 SEED=1`.

For each combination of state store and checkpoint format, and each application: an undisturbed run; a run that is killed
at random moments (driver, JVM, or a pause during which a second driver takes over); then restores
of random slots of the killed run. After each, the sinks must hold the rows of the undisturbed run,
batch by batch.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path

import psutil

from tests.sealed_queries.apps import APPS, App
from tests.sealed_queries.rig import COMBINATIONS, KilledJob
from tests.servers.minio import running
from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog


def prove_combination(
    folder: Path,
    name: str,
    kills: int,
    restores: int,
    dice: random.Random,
    *,
    app: type[App],
    files: int = 8,
    bucket: str | None = None,
) -> tuple[int, int, int]:
    """Kills, restores and differences of one combination; `bucket` instead of a local store."""
    conf, prefix = COMBINATIONS[name], f"{app.name}-{name}"
    with closing(KilledJob(folder / f"{prefix}-whole", conf, app, files)) as whole:
        whole.run_to_end_of_input()
        expected, differences = whole.app.outputs(), 0
    store_url = bucket and f"s3://{bucket}/{prefix}"
    job = KilledJob(folder / f"{prefix}-killed", conf, app, files, store_url)
    name = f"{app.name} on {name}"
    with closing(job):
        for number in range(kills):
            _disturb(job, dice, files * (number + 1) // (kills + 1))
        job.run_to_end_of_input()
        differences += _compare(f"{name} after {kills} kills", expected, job.app.outputs())
        differences += _restore_often(name, job, restores, dice, expected)
    return kills, restores, differences


def _restore_often(
    name: str, job: KilledJob, restores: int, dice: random.Random, expected: dict[str, object]
) -> int:
    """Go back to random slots, and run to the end of the input again; differences."""
    differences = 0
    for _ in range(restores):
        rows = CheckpointCatalog(job.log).list_checkpoints()
        target = dice.choice([row.id for row in rows if row.id is not None])
        job.restore(CheckpointId.parse(target))
        job.run_to_end_of_input()
        differences += _compare(f"{name} after a restore of {target}", expected, job.app.outputs())
    return differences


def _disturb(job: KilledJob, dice: random.Random, batch: int) -> None:
    """Let a driver seal up to a batch, and disturb it a moment later."""
    kind = dice.choice(["driver", "jvm", "pause"])
    process = job.launch()
    (query, *_) = job.app.last
    job.wait(lambda: job.positions().get(query, -1) >= batch)
    time.sleep(dice.random() * 3)
    if kind != "pause":
        job.kill(kind)
    else:
        both = [psutil.Process(process.pid)]
        both += both[0].children(recursive=True)
        for one in both:
            one.suspend()
        token = job.token()
        job.launch()  # takes the lease over, in a folder of its own
        job.wait(lambda: job.token() > token)
        for one in both:
            one.resume()
        print(f"  the paused driver ended with {process.wait(timeout=300)}", flush=True)
        job.kill()
    print(f"  {kind} at {job.positions()}", flush=True)


def _compare(what: str, expected: dict[str, object], found: dict[str, object]) -> int:
    different = [name for name in expected if expected[name] != found[name]]
    print(f"{what}: {', '.join(different) or 'equal'}", flush=True)
    for name in different:
        print(f"  expected {expected[name]!r:.2000}\n  found {found[name]!r:.2000}", flush=True)
    return len(different)


def main() -> None:
    """Run all combinations, and print the totals in the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3, help="per combination")
    parser.add_argument("--restores", type=int, default=3, help="per combination")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=COMBINATIONS, help="one combination")
    parser.add_argument("--apps", nargs="+", choices=APPS, default=["clicks"])
    parser.add_argument("--files", type=int, default=8, help="of input, a batch each")
    parser.add_argument("--minio", action="store_true", help="keep the sealed batches in MinIO")
    options = parser.parse_args()
    totals = [0, 0, 0]
    with ExitStack() as resources:
        folder = resources.enter_context(
            tempfile.TemporaryDirectory(prefix="jobs-proof-", ignore_cleanup_errors=True)
        )
        bucket = None
        if options.minio:
            minio = resources.enter_context(running(Path(folder)))
            os.environ.update(minio.environment())
            bucket = minio.bucket
        apps = [APPS[name] for name in options.apps]
        for app in apps:
            app.prepare(Path(folder) / f"server-{app.name}", resources)
        for name, app in product([options.only] if options.only else COMBINATIONS, apps):
            dice = random.Random(f"{options.seed} {name} {app.name}")
            more = {"app": app, "files": options.files, "bucket": bucket}
            work, kills = Path(folder), options.kills
            counts = prove_combination(work, name, kills, options.restores, dice, **more)
            totals = [total + count for total, count in zip(totals, counts, strict=True)]
            print("so far: {} kills, {} restores, {} differences".format(*totals), flush=True)
    print(f"{totals[0]} kills, {totals[1]} restores, {totals[2]} differences")
    raise SystemExit(1 if totals[2] else 0)


if __name__ == "__main__":
    main()
