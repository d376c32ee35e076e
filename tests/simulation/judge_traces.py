"""``python -m tests.simulation.judge_traces --seconds N --seed S``: ``make judge``.

First every step of soak schedules is taken by the rules of `protocol_steps`, as in each soak. Then
bugs are planted in the product: the rules must reject a step of each. Other checks of the simulation
do not count here.

With `--real N`, N real drivers on a real MinIO are killed first (`tests/e2e/real_kills.py`), and the
steps that the bucket has kept are taken. Bugs are planted in that history as well. `--seconds 0`
leaves the schedules and their bugs out. Exit code 1 if a step was not taken, or a bug was not
rejected.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from itertools import count

from tests.simulation.cheap import cheap
from tests.simulation.mutants import MUTANTS, planted
from tests.simulation.planting import Mutant
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


@dataclass
class Verdict:
    """What was judged: runs, the steps taken, what was not taken, bugs planted and rejected."""

    runs: int = 0
    steps: int = 0
    wrong: list[str] = field(default_factory=list)
    planted: int = 0
    rejected: int = 0

    def note_bug(self, name: str, found: str) -> None:
        """Count a planted bug; `found` is the step that was rejected, or nothing."""
        self.planted += 1
        self.rejected += bool(found)
        _say(f"{name}: {found or 'NOT REJECTED'}")

    def __str__(self) -> str:
        taken = "all taken" if not self.wrong else f"{len(self.wrong)} runs with a violation"
        bugs = f"{self.rejected} of {self.planted} planted bugs rejected"
        return f"{self.runs} runs, {self.steps} steps, {taken}; {bugs}"


def judge_simulation(verdict: Verdict, seconds: float, patience: float, seed: int) -> None:
    """Judge schedules, then plant bugs in the product."""
    runs, steps, wrong = judge_soak(seconds, seed)
    _say("\n".join(wrong) or f"{steps / max(runs, 1):.0f} steps in a schedule")
    verdict.runs += runs
    verdict.steps += steps
    verdict.wrong += wrong
    for mutant in select_planted():
        verdict.note_bug(mutant.name, is_rejected(mutant, patience, seed))


def judge_real_kills(verdict: Verdict, kills: int, seed: int) -> None:
    """Kill real drivers, judge what they left, then plant bugs in that history."""
    from tests.e2e.real_kills import run_real_kills

    found = run_real_kills(kills, seed)
    _say(str(found))
    verdict.runs += kills
    verdict.steps += found.steps.total()
    verdict.wrong += found.problems
    for name, rejected in found.forgeries.items():
        verdict.note_bug(f"real history: {name}", rejected)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for the schedules")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for each bug")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", type=int, default=0, metavar="N", help="real drivers to kill")
    given = parser.parse_args()
    verdict = Verdict()
    if given.real:
        judge_real_kills(verdict, given.real, given.seed)
    if given.seconds:
        judge_simulation(verdict, given.seconds, given.patience, given.seed)
    _say(str(verdict))
    return int(bool(verdict.wrong) or verdict.rejected < verdict.planted)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
