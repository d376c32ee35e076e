"""How long commands take that people wait for: `python -m tests.bench.cli`, or `make bench-cli`.

Makes a pipeline in a scratch folder, runs it once, and prints the median, the processor time and
the load average of each command. Byte code is cached in the scratch folder, as an installed
package has it.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 5
COMMANDS = {
    "help": ("--help",),
    "status": ("status", "shop"),
    "tables": ("tables", "shop"),
    "table": ("tables", "shop", "per_minute"),
    "row": ("row", "shop", "id=7"),
    "list": ("checkpoints", "list", "shop"),
    "validate": ("validate", "shop"),
    "plan": ("plan", "shop"),
    "test": ("test", "shop"),
}
CASES = 20  # that the last one runs


def call(folder: Path, *words: str) -> None:
    """Run one command; its output is not kept."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder / "pycache")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "tidegate.jobs.cli", *words]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


def measure(folder: Path, *words: str) -> tuple[float, float]:
    """Return the median of wall seconds and of processor seconds."""
    call(folder, *words)  # compiles what it imports
    walls, processors = [], []
    for _ in range(ROUNDS):
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        call(folder, *words)
        walls.append(time.monotonic() - begin)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processors.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(walls), statistics.median(processors)


def main() -> None:
    """Make the pipeline, measure, print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "shop"
        data.mkdir()
        lines = [f"2026-03-01T10:{n // 60:02}:{n % 60:02}Z,{n},{n % 9}.5" for n in range(1_700)]
        (data / "1.csv").write_text("\n".join(["at,id,amount", *lines, ""]))
        call(folder, "init", "shop")
        call(folder, "test", "shop", "--record")
        (case,) = (folder / "cases" / "shop").glob("*.yaml")
        for number in range(1, CASES):
            shutil.copyfile(case, case.with_name(f"{number}.yaml"))
        call(folder, "run", "shop", "--until-end", "--quiet")
        print("command     wall s  processor s  load")
        for title, words in COMMANDS.items():
            wall, processor = measure(folder, *words)
            print(
                f"{title:<10} {wall:7.2f} {processor:12.2f}  {os.getloadavg()[0]:.1f}", flush=True
            )


if __name__ == "__main__":
    main()
