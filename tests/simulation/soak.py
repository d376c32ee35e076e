"""``python -m tests.simulation.soak --seconds N --seed S --jobs J``.

Schedules until the time is over, and what was met.

First a tour: for each possible cell of the table (a kind of fault at a step of the protocol)
schedules that are cruel to it, until it was reached. Then one seed after the other. The last
seventh of the time goes to histories of jobs (`job_world`). Exit code 1 when a schedule or a history ended
in a violation, or, with ``--complete``, when a cell was not reached.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from structlog.testing import capture_logs
from tests.simulation.cheap import cheap
from tests.simulation.coverage import CELLS, table, unreached
from tests.simulation.job_world import ViolationError, run_world
from tests.simulation.schedule import run_seed

_PER_JOB = 1 << 40  # seeds between two jobs' first ones
_TRIES = 60  # schedules for a cell of the tour
_HISTORIES = 1 / 7  # part of the time that histories of jobs take


@dataclass
class Soak:
    """What a soak did; of the tour also by itself, because its schedules take longer."""

    schedules: int = 0
    toured: int = 0
    histories: int = 0
    tour_cpu: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    states: set[int] = field(default_factory=set)
    violations: list[tuple[str, str]] = field(default_factory=list)

    def add(self, other: Soak) -> None:
        """What another process did meanwhile."""
        self.schedules += other.schedules
        self.toured += other.toured
        self.histories += other.histories
        self.tour_cpu += other.tour_cpu
        self.steps += other.steps
        self.seconds = max(self.seconds, other.seconds)
        self.cpu += other.cpu
        self.faults.update(other.faults)
        self.states |= other.states
        self.violations += other.violations

    @property
    def missing(self) -> list[str]:
        """Cells of the table that are possible and were not reached."""
        return [*unreached(self.faults)]

    def report(self) -> str:
        """All numbers; the last line is the verdict."""
        after = self.schedules - self.toured, self.cpu - self.tour_cpu
        counted = (self.schedules, self.seconds), (self.schedules, self.cpu), after
        rate, alone, rested = (many / max(spent, 1e-9) for many, spent in counted)
        return "\n".join(
            [
                "faults injected, by step and kind:",
                table(self.faults),
                f"{len(CELLS) - len(self.missing)} of {len(CELLS)} possible cells reached"
                + (f"; not: {', '.join(self.missing[:20])}" if self.missing else ""),
                *(f"seed {seed}: {what}" for seed, what in self.violations),
                (
                    f"{self.steps} steps, {self.faults.total()} faults, {len(self.states)} distinct"
                    f" states, {rate:.1f} schedules/s ({alone:.1f} per second of CPU,"
                    f" {rested:.1f} after the tour)"
                ),
                f"{self.histories} histories of jobs",
                f"{self.schedules} schedules, {len(self.violations)} violations",
            ]
        )


def soak(seconds: float, seed: int = 0, *, jobs: int = 1, complete: bool = False) -> Soak:
    """The tour, then schedules `seed`, `seed + 1`, ... for a while.

    Jobs share the tour and have seeds of their own.

    With `complete` the tour takes the time it needs.
    """
    if jobs == 1:
        return _run(seconds, seed, CELLS, complete)
    done = Soak()
    parts = [(seconds, seed + _PER_JOB * job, CELLS[job::jobs], complete) for job in range(jobs)]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for part in pool.starmap(_run, parts):
            done.add(part)
    return done


def _run(seconds: float, seed: int, cells: tuple[tuple[str, str], ...], complete: bool) -> Soak:
    done, begun, cpu = Soak(), time.monotonic(), time.process_time()
    for_jobs = seconds * _HISTORIES
    with cheap(), _seldom_collected():
        for number, focus in _plan(done, seed, cells):
            if time.monotonic() - begun > seconds - for_jobs and not (complete and focus):
                break
            world = run_seed(number, states=done.states, focus=focus)
            done.schedules += 1
            done.steps += world.steps
            if focus:
                done.toured, done.tour_cpu = done.schedules, time.process_time() - cpu
            done.faults.update(world.faults)
            if world.violation is not None:
                done.violations.append((_name(number, focus), str(world.violation)))
    done.seconds, done.cpu = time.monotonic() - begun, time.process_time() - cpu
    _run_histories(done, for_jobs, seed)
    return done


def _run_histories(done: Soak, seconds: float, seed: int) -> None:
    """Run histories of jobs for a while, at least one."""
    begun = time.monotonic()
    for number in count(seed):
        try:
            with capture_logs():
                run_world(number)
        except ViolationError as error:
            said = "; ".join([str(error), *getattr(error, "__notes__", ())])
            done.violations.append((f"{number} of jobs", said))
        done.histories += 1
        if time.monotonic() - begun > seconds:
            return


def _name(number: int, focus: tuple[str, str] | None) -> str:
    return f"{number} --about '{focus[0]}' '{focus[1]}'" if focus else str(number)


def _plan(
    done: Soak, seed: int, cells: tuple[tuple[str, str], ...]
) -> Iterator[tuple[int, tuple[str, str] | None]]:
    """Seeds, and what each is about.

    The tour's cells until they are reached, then whatever the seed itself says.
    """
    for cell in cells:
        for number in range(seed, seed + _TRIES):
            if done.faults[cell]:
                break
            yield number, cell
    yield from ((number, None) for number in count(seed))


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Modules and live schedules are not looked through again and again: a tenth of the time."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--complete",
        action="store_true",
        help="finish the tour whatever the time; fail if a cell was not reached",
    )
    parser.add_argument("--trace", type=int, metavar="SEED", help="tell the story of one schedule")
    parser.add_argument(
        "--about",
        nargs=2,
        metavar=("KIND", "STEP"),
        help="with --trace: the cell that it is cruel to",
    )
    given = parser.parse_args()
    if given.trace is not None:
        world = run_seed(given.trace, trace=True, focus=tuple(given.about) if given.about else None)
        print("\n".join(world.trace or []))  # noqa: T201
        print(f"seed {given.trace}: {world.violation or 'no violation'}")  # noqa: T201
        return int(world.violation is not None)
    os.environ.setdefault("PYTHONHASHSEED", "0")  # of the jobs, so that equal states count once
    done = soak(given.seconds, given.seed, jobs=max(1, given.jobs), complete=given.complete)
    print(done.report())  # noqa: T201
    return int(bool(done.violations) or (given.complete and bool(done.missing)))


if __name__ == "__main__":
    sys.exit(main())
