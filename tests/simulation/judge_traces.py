"""``python -m tests.simulation.judge_traces --seconds N --seed S``: ``make judge``.

First every step of soak schedules is taken by the rules of `protocol_steps`, as in each soak. Then
bugs are planted in the product: the rules must reject a step of each. Other checks of the simulation
do not count here. With `--real N` it also runs a real driver on a real MinIO, kills driver, JVM and
MinIO N times, and takes the steps that the bucket has kept. Exit code 1 if a step was not taken, or
a bug was not rejected.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import count

from tests.simulation.cheap import cheap
from tests.simulation.mutants import MUTANTS, Mutant, planted
from tests.simulation.protocol_trace import UntakenError
from tests.simulation.schedule import run_seed

PLANTED = (
    "seal without condition",
    "publish before seal",
    "no fence snapshot",
    "publishers rebase (pyiceberg's own retry)",
    "GC of an undecided attempt",
    "GC forgets the files of tables",
    "restore without a claim",
    "compaction: readers are pointed to it wherever they are",
    "compaction: files deleted that may still be named",
)
"""Bugs that make a process take a step that the protocol does not allow."""


def select_planted() -> list[Mutant]:
    """Return those of the simulation's bugs that the rules must reject."""
    return [mutant for mutant in MUTANTS if mutant.name in PLANTED]


def judge_soak(seconds: float, seed: int = 0) -> tuple[int, int, list[str]]:
    """Return how many schedules ran, how many steps were taken, and which one was not."""
    until, steps, wrong = time.monotonic() + seconds, 0, list[str]()
    with cheap():
        for number in count(seed):
            if time.monotonic() > until:
                return number - seed, steps, wrong
            world = run_seed(number)
            steps += world.judge.steps
            if world.violation is not None:
                wrong.append(f"seed {number}: {world.violation}")
    raise AssertionError("seeds do not end")


def is_rejected(mutant: Mutant, seconds: float, seed: int = 0) -> str:
    """Run schedules with a bug until a step is rejected; return which, or nothing."""
    until = time.monotonic() + seconds
    with cheap(), planted(mutant):
        for number in count(seed):
            if time.monotonic() > until:
                break
            try:
                world = run_seed(number, rate=mutant.rate, focus=mutant.focus, sink=mutant.sink)
            except Exception:
                continue
            if isinstance(world.violation, UntakenError):
                return f"after {number - seed + 1} schedules: {world.violation}"
    return ""


def judge_real_kills(kills: int, seed: int) -> int:
    """Run a real pipeline under kills and print what came of it; return how many problems."""
    from tests.e2e.chaos import run_chaos

    outcome = run_chaos(kills, seed)
    print(f"{kills} real kills:\n{outcome.text()}", flush=True)  # noqa: T201
    return len(outcome.problems)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for the schedules")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for each bug")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", type=int, default=0, metavar="N", help="real kills to judge")
    given = parser.parse_args()
    real = judge_real_kills(given.real, given.seed) if given.real else 0
    runs, steps, wrong = judge_soak(given.seconds, given.seed)
    print("\n".join(wrong) or f"{steps / max(runs, 1):.0f} steps in a schedule", flush=True)  # noqa: T201
    rejected = 0
    for mutant in select_planted():
        found = is_rejected(mutant, given.patience, given.seed)
        rejected += bool(found)
        print(f"{mutant.name}: {found or 'NOT REJECTED'}", flush=True)  # noqa: T201
    taken = "all taken" if not wrong else f"{len(wrong)} runs with a violation"
    verdict = f"{rejected} of {len(PLANTED)} planted bugs rejected"
    print(f"{runs} runs, {steps} steps, {taken}; {verdict}")  # noqa: T201
    return int(bool(wrong) or real > 0 or rejected < len(PLANTED))


if __name__ == "__main__":
    sys.exit(main())
