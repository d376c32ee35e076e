"""``make jobs-matrix``: each kind of script x each disturbance, with a real Spark.

A cell is one run that is disturbed once, and then compared with an undisturbed run of the same
script. The last line is ``N cells, N differences, N not run``. A cell for which there is no script
yet, or that this host cannot run, counts as not run, never as passed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import psutil

from tests.sealed_queries.apps import APPS
from tests.sealed_queries.jobs_proof import compare_outputs
from tests.sealed_queries.rig import COMBINATIONS, KilledJob
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
_LATE = (
    3.0  # seconds at most after a batch, so that a disturbance comes at another moment each time
)


def _kill(victim: str) -> Callable[[KilledJob], None]:
    return lambda job: job.kill(victim)


def _freeze_python(job: KilledJob) -> None:
    """Stop Python alone until another driver has the lease."""
    before = job.process
    assert before is not None
    python = psutil.Process(before.pid)
    python.suspend()
    job.launch()
    job.wait(job.holds_lease)
    python.resume()
    # It finds that the lease is lost, or that its JVM is gone.
    assert before.wait(timeout=600) in (3, 4)


def _restore_and_collect(job: KilledJob) -> None:
    """Go back to the beginning; retention removes what was left before the next launch."""
    job.kill()
    job.restore(None)
    policy = RetentionPolicy(keep_last=100, keep_for=0, grace=0)
    Retention(job.log, policy, external=list).run()


def _restore_twice(job: KilledJob) -> None:
    """Go back to the first batch, and then to the beginning."""
    job.kill()
    job.restore(job.read_line()[0].id)
    job.restore(None)


# None: this host cannot do it.
DISTURBANCES: dict[str, Callable[[KilledJob], None] | None] = {
    "kill driver": _kill("driver"),
    "kill JVM": _kill("jvm"),
    "freeze Python": _freeze_python,
    "store away": None,  # `make jobs-proof ARGS=--minio` does it
    "restore and gc": _restore_and_collect,
    "two restores": _restore_twice,
    "clock back": None,  # the clock of one process cannot be changed; `make jobs-soak` does it
}


def run_cell(folder: Path, case: str, disturbance: str, dice: random.Random) -> int | None:
    """Run one cell; return the number of differences, or None if it cannot run."""
    name, disturb = CASES[case], DISTURBANCES[disturbance]
    if name is None or disturb is None:
        return None
    app, conf = APPS[name], COMBINATIONS["rocksdb-2"]
    with ExitStack() as resources:
        app.prepare(folder / "server", resources)
        whole = resources.enter_context(closing(KilledJob(folder / "whole", conf, app, _FILES)))
        whole.run_to_end_of_input()
        job = resources.enter_context(closing(KilledJob(folder / "disturbed", conf, app, _FILES)))
        job.launch()
        job.wait(lambda: job.holds_lease() and len(job.positions()) == len(app.queries))
        time.sleep(dice.random() * _LATE)
        disturb(job)
        job.run_to_end_of_input()
        return compare_outputs(f"{case}, {disturbance}", whole.app.outputs(), job)


def main() -> int:
    """Run the cells, print the matrix, and return 1 if one differs or did not end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", type=int, default=1, help="run one cell in so many, by the seed")
    options = parser.parse_args()
    dice, outcomes = random.Random(options.seed), dict[tuple[str, str], str]()
    cells = [(case, kind) for case in CASES for kind in DISTURBANCES]
    chosen = set(dice.sample(cells, len(cells) // options.part))
    for case, kind in cells:
        outcome: int | None = None
        if (case, kind) in chosen:
            with tempfile.TemporaryDirectory(prefix="jobs-matrix-") as folder:
                try:
                    outcome = run_cell(Path(folder), case, kind, dice)
                except Exception:  # the other cells are run nevertheless
                    traceback.print_exc()
                    outcome = 1
        outcomes[case, kind] = "not run" if outcome is None else "differs" if outcome else "equal"
    print("| |", " | ".join(DISTURBANCES), "|")
    for case in CASES:
        print(f"| {case} |", " | ".join(outcomes[case, kind] for kind in DISTURBANCES), "|")
    counts = Counter(outcomes.values())
    run = counts["equal"] + counts["differs"]
    print(f"{run} cells, {counts['differs']} differences, {counts['not run']} not run")
    return int(counts["differs"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
