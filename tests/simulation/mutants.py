"""``python -m tests.simulation.mutants``.

Bugs put in on purpose; the simulation must find each of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.simulation.cheap import cheap
from tests.simulation.driver_mutants import DRIVER_MUTANTS
from tests.simulation.log_mutants import LOG_MUTANTS
from tests.simulation.planting import Mutant
from tests.simulation.schedule import run_seed
from tests.simulation.sinks_mutants import SINKS_MUTANTS

MUTANTS = (*LOG_MUTANTS, *DRIVER_MUTANTS, *SINKS_MUTANTS)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The bug is in."""
    patches = mutant.make()
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def hunt(mutant: Mutant, seconds: float, seed: int = 0) -> tuple[int, str]:
    """Schedules until it was found, and what was found; an empty text if it was missed.

    The seconds are of the processor, so that other work on the machine changes nothing.
    """
    begun, number = time.process_time(), 0
    with cheap(), planted(mutant):
        while time.process_time() - begun < seconds:
            number += 1
            try:
                world = run_seed(
                    seed + number, rate=mutant.rate, focus=mutant.focus, sink=mutant.sink
                )
            except (AttributeError, NameError):  # a defect of the mutant itself
                raise
            except Exception as error:  # a defect that ends a driver is found as well
                return number, f"{type(error).__name__}: {error}"
            if world.violation is not None:
                return number, str(world.violation)
    return number, ""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each bug")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    missed = 0
    for mutant in MUTANTS:
        begun = time.process_time()
        number, what = hunt(mutant, given.seconds, given.seed)
        missed += not what
        spent = f"{number} schedules, {time.process_time() - begun:.1f} s"
        told = f"found after {spent}: {what[:200]}" if what else f"MISSED in {spent}"
        print(f"{mutant.name:<48} {told}", flush=True)  # noqa: T201
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
