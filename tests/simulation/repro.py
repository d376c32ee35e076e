"""``make repro N=A1``: bring back a fault of docs/track-record.md and show what it does.

A fault that the simulation can express is planted again. Then a script shows it, or schedules run
until one of them shows the failure; the command ends with exit code 1 if none does within a minute.
For any other fault it runs the regression test, which passes on the repaired code.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from tests.simulation.killers import KILLERS, play
from tests.simulation.mutants import MUTANTS, hunt

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0


def read_fault(number: str) -> tuple[str, str]:
    """Return what the fault was and its regression test.

    Raises:
        SystemExit: the list has no such fault, or it is not fixed.
    """
    text = (ROOT / "docs" / "track-record.md").read_text(encoding="utf-8")
    found = re.search(
        rf"^\| {re.escape(number)} \| S\d \| (.*?) \| (.*?) \| `?([^`|]*)", text, re.M
    )
    if found is None:
        sys.exit(f"docs/track-record.md has no fault {number}")
    if found[2] == "open":
        sys.exit(f"{number} ({found[1]}) is not fixed, so it has no test yet")
    return found[1], found[3]


def main() -> int:
    """Show one fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", help="an id of docs/track-record.md, for example A1")
    number = parser.parse_args().fault
    what, test = read_fault(number)
    sys.stdout.write(f"{number}: {what}\n")
    sys.stdout.flush()
    killer = next((killer for killer in KILLERS if killer.fault == number), None)
    if killer is not None:
        violation = play(killer, mended=False).violation
        sys.stdout.write(f"without the repair, the script '{killer.name}' ends so:\n{violation}\n")
        return int(violation is None)
    mutant = next((mutant for mutant in MUTANTS if mutant.fault == number), None)
    if mutant is None:
        sys.stdout.write(f"the simulation cannot express it; its test is {test}\n")
        sys.stdout.flush()
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", test]
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    schedules, seen = hunt(mutant, SECONDS)
    if not seen:
        sys.stdout.write(f"without the repair, {schedules} schedules showed nothing\n")
        return 1
    sys.stdout.write(f"without the repair, schedule {schedules} fails:\n{seen}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
