"""``make jobs-matrix``: each kind of script x each disturbance, with a real Spark.

A cell is one run that is disturbed once, and then compared with an undisturbed run of the same
script. Its outcome is one of these:

- *equal*, or *differs*: the sinks hold the rows of the undisturbed run, or not;
- *broken*: the run did not end, or the disturbance had not the effect that it must have;
- *no script*: there is no application of this kind yet;
- *simulated*: no real host can do it, and `make jobs-soak` does;
- *left out*: this run did not ask for it.

The last line is ``N cells, N differences, N broken, N not run``. The exit code is 0 only if at least
one cell ran and all that ran are equal.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from unittest.mock import patch

import psutil

from tests.sealed_queries.apps import APPS, App
from tests.sealed_queries.jobs_proof import compare_outputs
from tests.sealed_queries.rig import COMBINATIONS, KilledJob
from tests.servers.minio import RealMinio, running
from tests.servers.processes import kill_jvms
from tidegate.checkpoints.retention import Retention, RetentionPolicy

# Kind of script -> the application that shows it; None: there is none yet.
CASES: dict[str, str | None] = {
    "a join of two streams": "join",
    "b table": "windows",
    "c foreachBatch upserts": "clicks",
    "d state with timers": None,
    "e session windows": None,
    "f arguments and packages": None,
    "g checkpoint taken over": "copy",
    "h ends of scripts": None,
    "i availableNow": None,
    "j bad data": None,
}
_FILES = 4
_LATE = 3.0
"""Seconds at most from a batch to a disturbance, so that it comes at another moment each time."""
_OUTAGE = 12.0
"""Seconds at most without the store; a lease lasts for 6."""
_Disturbance = Callable[[KilledJob, RealMinio | None, random.Random], None]


def _kill_driver(job: KilledJob, _minio: RealMinio | None, _dice: random.Random) -> None:
    job.kill()


def _kill_jvm(job: KilledJob, _minio: RealMinio | None, _dice: random.Random) -> None:
    """Kill the JVM alone; the driver must call that a failure that a new launch may repair."""
    process = job.process
    assert process is not None
    assert kill_jvms(process.pid), "the driver had no JVM"
    code = process.wait(timeout=600)
    assert code == 3, f"without its JVM the driver ended with {code}"


def _freeze_python(job: KilledJob, _minio: RealMinio | None, _dice: random.Random) -> None:
    """Stop Python alone until another driver has the lease."""
    before = job.process
    assert before is not None
    python = psutil.Process(before.pid)
    python.suspend()
    job.launch()
    job.wait(job.holds_lease)
    python.resume()
    # It finds that the lease is lost, or that its JVM is gone.
    code = before.wait(timeout=600)
    assert code in (3, 4), f"the driver that stood still ended with {code}"


def _take_store_away(job: KilledJob, minio: RealMinio | None, dice: random.Random) -> None:
    """Kill the store, and start it again; the same driver or a new launch goes on."""
    assert minio is not None
    at = job.positions()
    minio.server.kill()
    time.sleep(dice.random() * _OUTAGE)
    minio.server.start()
    job.wait(lambda: job.is_complete() or job.positions() != at)


def _restore_and_collect(job: KilledJob, _minio: RealMinio | None, _dice: random.Random) -> None:
    """Go back to the beginning; retention removes what was left before the next launch."""
    job.kill()
    job.restore(None)
    policy = RetentionPolicy(keep_last=100, keep_for=0, grace=0)
    Retention(job.log, policy, external=list).run()


def _restore_twice(job: KilledJob, _minio: RealMinio | None, _dice: random.Random) -> None:
    """Go back to the first batch, and then to the beginning."""
    job.kill()
    job.restore(job.read_line()[0].id)
    job.restore(None)


DISTURBANCES: dict[str, _Disturbance | None] = {
    "kill driver": _kill_driver,
    "kill JVM": _kill_jvm,
    "freeze Python": _freeze_python,
    "store away": _take_store_away,
    "restore and gc": _restore_and_collect,
    "two restores": _restore_twice,
    "clock back": None,  # the clock of one process cannot be changed
}


def judge_cell(case: str, disturbance: str, dice: random.Random) -> str:
    """Run one cell; return its outcome."""
    name, disturb = CASES[case], DISTURBANCES[disturbance]
    if disturb is None:
        return "simulated"
    if name is None:
        return "no script"
    try:
        with ExitStack() as resources:
            folder = tempfile.TemporaryDirectory(prefix="jobs-matrix-", ignore_cleanup_errors=True)
            path = Path(resources.enter_context(folder))
            what = f"{case}, {disturbance}"
            differences = _run_cell(path, APPS[name], what, disturb, dice, resources)
    except Exception:  # the other cells are run nevertheless
        traceback.print_exc()
        return "broken"
    return "differs" if differences else "equal"


def _run_cell(
    folder: Path,
    app: type[App],
    what: str,
    disturb: _Disturbance,
    dice: random.Random,
    resources: ExitStack,
) -> int:
    """Return in how many sinks a disturbed run differs from an undisturbed one."""
    conf, minio = COMBINATIONS["rocksdb-2"], None
    app.prepare(folder / "server", resources)
    whole = resources.enter_context(closing(KilledJob(folder / "whole", conf, app, _FILES)))
    whole.run_to_end_of_input()
    environment, store_url = dict(os.environ), None
    if disturb is _take_store_away:
        minio = resources.enter_context(running(folder))
        resources.enter_context(patch.dict(os.environ, minio.environment()))
        environment, store_url = dict(os.environ), f"s3://{minio.bucket}/job"
    disturbed = KilledJob(folder / "disturbed", conf, app, _FILES, store_url, environment)
    job = resources.enter_context(closing(disturbed))
    job.launch()
    job.wait(lambda: job.holds_lease() and len(job.positions()) == len(app.queries))
    time.sleep(dice.random() * _LATE)
    disturb(job, minio, dice)
    job.run_to_end_of_input()
    return compare_outputs(what, whole.app.outputs(), job)


def _choose_cells(
    cases: Sequence[str], disturbances: Sequence[str], part: int, dice: random.Random
) -> set[tuple[str, str]]:
    """The cells to run: one in so many of those of the given cases and disturbances."""
    cells = [(case, kind) for case in cases for kind in disturbances]
    return set(dice.sample(cells, -(-len(cells) // part)))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", type=int, default=1, help="run one cell in so many, by the seed")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--disturbances", nargs="+", choices=DISTURBANCES, default=list(DISTURBANCES)
    )
    return parser.parse_args()


def main() -> int:
    """Run the cells, print the matrix, and return 0 only if some ran and all of them are equal."""
    options = _parse_options()
    dice, outcomes = random.Random(options.seed), dict[tuple[str, str], str]()
    chosen = _choose_cells(options.cases, options.disturbances, options.part, dice)
    for case in CASES:
        for kind in DISTURBANCES:
            cell = case, kind
            outcomes[cell] = judge_cell(case, kind, dice) if cell in chosen else "left out"
    print("| |", " | ".join(DISTURBANCES), "|")
    print("|---" * (len(DISTURBANCES) + 1) + "|")
    for case in CASES:
        print(f"| {case} |", " | ".join(outcomes[case, kind] for kind in DISTURBANCES), "|")
    counts = Counter(outcomes.values())
    ran = counts["equal"] + counts["differs"] + counts["broken"]
    print(
        f"{ran} cells, {counts['differs']} differences, {counts['broken']} broken,"
        f" {len(outcomes) - ran} not run"
    )
    return int(not ran or ran > counts["equal"])


if __name__ == "__main__":
    raise SystemExit(main())
