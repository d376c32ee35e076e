"""Decision 6, measured.

``spark.jvm: quick`` against ``throughput`` on small epochs, in interleaved rounds. ``make
bench-jvm``.

``python -m tests.bench.jvm [--rounds 3] [--epochs 12] [--rows 2000]``

Each round starts one new driver of each kind on the same input, `--rows` rows an epoch, ordered and
in windows. Seconds until the first checkpoint count from the start of the process: that is the gap
after a kill.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.bench.generate import generate

_KINDS: Final = ("throughput", "quick")


def start(kind: str, source: Path, out: Path) -> dict[str, Any]:
    """One driver, from nothing to the end of the input."""
    out.mkdir()
    call = [sys.executable, "-m", "tests.bench.ours", "both", str(source), str(out), "--jvm", kind]
    done = subprocess.run(
        call, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    late = found["epochs"][len(found["epochs"]) // 2 :]
    return {
        "first_seal": found["first_seal"],
        "epoch": statistics.median(late),
        "seconds": found["seconds"],
        "cpu": found["cpu"],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rows", type=int, default=2_000, help="rows an epoch")
    given = parser.parse_args()
    rounds: list[dict[str, dict[str, Any]]] = []
    with TemporaryDirectory(prefix="tidegate-bench-") as scratch:
        source = Path(scratch) / "input"
        generate(source, given.rows * given.epochs, given.epochs)
        for number in range(given.rounds):
            rounds.append({})
            for kind in _KINDS if number % 2 == 0 else reversed(_KINDS):
                rounds[-1][kind] = start(kind, source, Path(scratch) / f"{kind}-{number}")
                print(
                    f"round {number + 1}: {kind} {rounds[-1][kind]}, load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    print(
        f"{given.epochs} epochs of {given.rows:,} rows, {given.rounds} interleaved rounds,"
        f" {os.cpu_count()} cores; medians"
    )
    print(
        "| JVM | start to first checkpoint | later epochs | whole input | processor time"
        " |\n|---|---|---|---|---|"
    )
    for kind in _KINDS:
        cells = [
            statistics.median(one[kind][what] for one in rounds)
            for what in ("first_seal", "epoch", "seconds", "cpu")
        ]
        print(f"| {kind} | " + " | ".join(f"{cell:.2f} s" for cell in cells) + " |")
    ratios = [one["throughput"]["first_seal"] / one["quick"]["first_seal"] for one in rounds]
    print(
        f"first checkpoint sooner by a factor of {statistics.median(ratios):.2f} (median of the"
        " rounds' ratios)"
    )


if __name__ == "__main__":
    main()
