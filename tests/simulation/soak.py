"""``python -m tests.simulation.soak --seconds N --seed S``: schedules until the time is over, and what was met on the way."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.schedule import run_seed

__all__ = ["Soak", "soak"]


@dataclass
class Soak:
    """What a soak did."""

    schedules: int = 0
    steps: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    states: set[int] = field(default_factory=set)
    violations: list[tuple[int, str]] = field(default_factory=list)

    def table(self) -> str:
        """Faults injected: a row per kind, a column per step."""
        kinds = sorted({kind for kind, _ in self.faults})
        steps = sorted({step for _, step in self.faults})
        lines = [f"{'':<13}" + "".join(f"{step:>9}" for step in steps)]
        lines += [f"{kind:<13}" + "".join(f"{self.faults[kind, step] or '-':>9}" for step in steps) for kind in kinds]
        return "\n".join(lines)

    def report(self) -> str:
        """All numbers; the last line is the verdict."""
        found = [f"seed {seed}: {what}" for seed, what in self.violations]
        total = sum(self.faults.values())
        rate, alone = (self.schedules / max(spent, 1e-9) for spent in (self.seconds, self.cpu))
        return "\n".join(
            [
                "faults injected, by kind and step:",
                self.table(),
                *found,
                f"{self.steps} steps, {total} faults, {len(self.states)} distinct states, {rate:.1f} schedules/s "
                f"({alone:.1f} per second of CPU)",
                f"{self.schedules} schedules, {len(self.violations)} violations",
            ]
        )


def soak(seconds: float, seed: int = 0, *, most: int | None = None, stop_at_first: bool = False) -> Soak:
    """Run schedules `seed`, `seed + 1`, ... for a while."""
    done, begun, cpu = Soak(), time.monotonic(), time.process_time()
    while time.monotonic() - begun < seconds and (most is None or done.schedules < most):
        number = seed + done.schedules
        world = run_seed(number, states=done.states)
        done.schedules += 1
        done.steps += world.steps
        done.faults.update(world.faults)
        if world.violation is not None:
            done.violations.append((number, str(world.violation)))
            if stop_at_first:
                break
    done.seconds, done.cpu = time.monotonic() - begun, time.process_time() - cpu
    return done


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=int, metavar="SEED", help="tell the story of one schedule")
    given = parser.parse_args()
    if given.trace is not None:
        world = run_seed(given.trace, trace=True)
        print("\n".join(world.trace or []))  # noqa: T201
        print(f"seed {given.trace}: {world.violation or 'no violation'}")  # noqa: T201
        return int(world.violation is not None)
    done = soak(given.seconds, given.seed)
    print(done.report())  # noqa: T201
    return int(bool(done.violations))


if __name__ == "__main__":
    sys.exit(main())
