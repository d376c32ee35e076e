"""Kills and restores of jobs, drawn by a seed: `make jobs-proof KILLS=20 RESTORES=10 SEED=1`.

For each combination of state store and checkpoint format, and each application: an undisturbed run;
a run that is disturbed at random moments (kill -9 of the driver, of its JVM or of MinIO, or a pause
during which a second driver takes over); then restores of random slots of the killed run. After the
kills and after each restore, the sinks must hold the rows of the undisturbed run, and each batch
must be sealed once. Only the batches may have other borders: see `App.count_files`.

Kills and restores are counted per combination, and divided among the applications. Each combination
and each application comes early. With `--results` a run that has ended early goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import islice
from pathlib import Path

import psutil

from tests.sealed_queries.apps import APPS, App
from tests.sealed_queries.rig import COMBINATIONS, KilledJob
from tests.servers.jars import spark_jars
from tests.servers.minio import RealMinio, running
from tests.servers.processes import list_children, suspend_without_lock
from tidegate.jobs.spec.operations import JARS

_OUTAGE = 12.0  # seconds, the longest; a lease lasts for 6
_Share = tuple[type[App], int, int]  # application, its kills and its restores


def prove_combination(
    folder: Path,
    name: str,
    kills: int,
    restores: int,
    dice: random.Random,
    *,
    app: type[App],
    files: int = 8,
    minio: RealMinio | None = None,
    location: str = "host",
) -> tuple[int, int, int]:
    """Kills, restores and differences of one combination; with `minio` instead of a local store.

    The undisturbed run has a local store and Spark's checkpoints on this host; `location` is that
    of the killed run.
    """
    conf, prefix = COMBINATIONS[name], f"{app.name}-{name}"
    with closing(KilledJob(folder / f"{prefix}-whole", conf, app, files)) as whole:
        whole.run_to_end_of_input()
        expected, differences = whole.app.outputs(), 0
    store_url = f"s3://{minio.bucket}/{prefix}" if minio else None
    job = KilledJob(folder / f"{prefix}-killed", conf, app, files, store_url, location=location)
    name = f"{app.name} on {name}"
    with closing(job):
        for number, kind in enumerate(islice(_draw_kinds(dice, minio), kills)):
            _disturb(job, kind, dice, files * (number + 1) // (kills + 1), minio)
        job.run_to_end_of_input()
        differences += compare_outputs(f"{name} after {kills} kills", expected, job)
        for _ in range(restores):
            target = dice.choice(job.list_targets())
            job.restore(target)
            job.run_to_end_of_input()
            differences += compare_outputs(f"{name} after a restore of {target}", expected, job)
    return kills, restores, differences


def list_checkpoint_jars() -> str:
    """The jars with which Spark keeps checkpoints in a bucket, for ``TIDEGATE_SPARK_JARS``."""
    return ",".join(map(str, spark_jars("spark-s3a", JARS["s3a"])))


def _draw_kinds(dice: random.Random, minio: RealMinio | None) -> Iterator[str]:
    """All kinds in a random order, again and again."""
    kinds = ["driver", "jvm", "pause", *(["minio"] if minio else [])]
    while True:
        yield from dice.sample(kinds, len(kinds))


def _disturb(
    job: KilledJob, kind: str, dice: random.Random, batch: int, minio: RealMinio | None
) -> None:
    """Let a driver seal up to a batch, and disturb it a moment later."""
    if not job.is_running():
        job.launch()
    query = job.app.queries[0]
    job.wait(lambda: job.holds_lease() and job.positions().get(query, -1) >= batch)
    time.sleep(dice.random() * 3)
    at = job.positions()
    if kind == "pause":
        _pause(job)
    elif kind == "minio" and minio is not None:
        minio.server.kill()
        time.sleep(dice.random() * _OUTAGE)
        minio.server.start()
        # The driver goes on, and is disturbed again.
        job.wait(lambda: job.is_complete() or job.positions() != at)
    else:
        job.kill(kind)
    print(f"  {kind} at {at}", flush=True)


def _pause(job: KilledJob) -> None:
    """Stop driver and JVM until a second driver has the lease; the first has to end then."""
    process = job.process
    assert process is not None
    python, jvm = psutil.Process(process.pid), list_children(process.pid)
    suspend_without_lock(python)
    both = [python, *jvm]
    for one in jvm:
        with suppress(psutil.NoSuchProcess):  # a helper of the driver that has ended meanwhile
            one.suspend()
    job.launch()  # takes the lease over, in a folder of its own
    job.wait(job.holds_lease)
    for one in both:
        with suppress(psutil.NoSuchProcess):
            one.resume()
    code = process.wait(timeout=300)
    assert code == 4, f"the paused driver ended with {code}"


def compare_outputs(what: str, expected: dict[str, object], job: KilledJob) -> int:
    """Print whether the sinks of a job hold what they should, and return how many do not."""
    found = job.app.outputs()
    job.read_line()  # fails if a batch is sealed twice, or is missing
    different = [name for name in expected if expected[name] != found[name]]
    print(f"{what}: {', '.join(different) or 'equal'}", flush=True)
    for name in different:
        print(f"  expected {expected[name]!r:.2000}\n  found {found[name]!r:.2000}", flush=True)
    return len(different)


def _divide(total: int, parts: int) -> list[int]:
    """Divide as evenly as possible, the larger parts first."""
    return [total // parts + (number < total % parts) for number in range(parts)]


def _list_parts(names: Sequence[str], shares: Sequence[_Share]) -> Iterator[tuple[str, _Share]]:
    """Yield all pairs; the first of them have every name, and different shares."""
    for shift in range(len(shares)):
        for number, name in enumerate(names):
            yield name, shares[(number + shift) % len(shares)]


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3, help="per combination")
    parser.add_argument("--restores", type=int, default=3, help="per combination")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=COMBINATIONS, help="one combination")
    parser.add_argument("--apps", nargs="+", choices=APPS, default=["clicks"])
    parser.add_argument("--files", type=int, default=12, help="of input")
    parser.add_argument("--minio", action="store_true", help="keep the sealed batches in MinIO")
    parser.add_argument(
        "--checkpoints",
        choices=["host", "bucket"],
        default="host",
        help="where Spark keeps its own; the bucket is that of --minio",
    )
    parser.add_argument(
        "--results", type=Path, help="file of what has passed, which is not run again"
    )
    return parser.parse_args()


def _read_results(path: Path | None) -> dict[str, list[int]]:
    """Key of a part -> its kills, restores and differences."""
    if path is None or not path.exists():
        return {}
    return dict(json.loads(line) for line in path.read_text().splitlines())


def _run_part(
    options: argparse.Namespace, name: str, app: type[App], kills: int, restores: int
) -> list[int] | None:
    """Run one application on one combination; None if it did not end as it should."""
    dice = random.Random(f"{options.seed} {name} {app.name}")
    with ExitStack() as resources:
        folder = Path(
            resources.enter_context(
                tempfile.TemporaryDirectory(prefix="jobs-proof-", ignore_cleanup_errors=True)
            )
        )
        minio = resources.enter_context(running(folder)) if options.minio else None
        if minio is not None:
            os.environ.update(minio.environment())
        if options.checkpoints == "bucket":
            os.environ["TIDEGATE_SPARK_JARS"] = list_checkpoint_jars()
        try:
            app.prepare(folder / f"server-{app.name}", resources)
            more = {"app": app, "files": options.files, "minio": minio}
            more["location"] = options.checkpoints
            return [*prove_combination(folder, name, kills, restores, dice, **more)]
        except Exception:  # the other parts are run nevertheless
            traceback.print_exc()
            print(f"{app.name} on {name} did not end", flush=True)
            return None


def main() -> None:
    """Run all parts, and print the totals in the last line."""
    options = _parse_options()
    results, totals, failed = _read_results(options.results), [0, 0, 0], 0
    apps = [APPS[name] for name in options.apps]
    shares = zip(
        apps, _divide(options.kills, len(apps)), _divide(options.restores, len(apps)), strict=True
    )
    names = [options.only] if options.only else list(COMBINATIONS)
    for name, (app, kills, restores) in _list_parts(names, list(shares)):
        key = f"{name} {app.name} {kills} {restores} {options.seed} {options.files}"
        key += f" {options.checkpoints}"
        counts = results.get(key) or _run_part(options, name, app, kills, restores)
        if counts is None:
            failed += 1
            continue
        if options.results and key not in results and not counts[2]:
            with options.results.open("a") as file:
                file.write(json.dumps([key, counts]) + "\n")
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        print("so far: {} kills, {} restores, {} differences".format(*totals), flush=True)
    print(f"{totals[0]} kills, {totals[1]} restores, {totals[2]} differences", flush=True)
    raise SystemExit(1 if totals[2] or failed else 0)


if __name__ == "__main__":
    main()
