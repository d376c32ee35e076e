"""Memory of the driver's Python, its JVM and a worker, over the rows of one epoch.

``python -m tests.bench.memory [--rows 4000000 40000000] [--columns 20] [--jobs default order]``
runs each job in a process of its own: one epoch of so many rows, each source's share in one object.
It prints the greatest resident size of each process, in MB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.bench.generate import KEYS, ROW_GROUP, SOURCES, make_rows
from tests.bench.meter import list_peaks
from tests.bench.ours import JOBS, bench_spec, run
from tidegate.jobs.driver.log_output import configure_logs
from tidegate.jobs.spec.pipeline import PipelineSpec

_BASE_COLUMNS: Final = 5  # of `make_rows`


def write_input(folder: Path, rows: int, columns: int) -> None:
    """Write an object of so many columns for each source, with its share of the rows."""
    dice = np.random.default_rng(1)
    for source in range(SOURCES):
        path = folder / f"s{source}" / "part-00000.parquet"
        path.parent.mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            writer: pq.ParquetWriter | None = None
            for first in range(0, rows // SOURCES, ROW_GROUP):
                count = min(ROW_GROUP, rows // SOURCES - first)
                group = make_rows(dice, source, first, count, KEYS)
                for number in range(columns - _BASE_COLUMNS):
                    values = pa.array(dice.integers(0, 1_024, count) / 1_024.0)
                    group = group.append_column(f"v{number}", values)
                if writer is None:
                    writer = stack.enter_context(pq.ParquetWriter(path, group.schema))
                writer.write_table(group)
        (path.parent / "_DONE").touch()


def make_spec(job: str, columns: int) -> PipelineSpec:
    """The bench's pipeline whose sources have so many columns."""
    fields: dict[str, Any] = bench_spec(job, {}).model_dump(
        mode="json", by_alias=True, exclude_unset=True
    )
    del fields["spark"]["driver_memory"]  # the default of users
    for source in fields["sources"].values():
        source["schema"] |= {f"v{number}": "double" for number in range(columns - _BASE_COLUMNS)}
    return PipelineSpec.model_validate(fields)


def measure_epoch(job: str, rows: int, columns: int) -> None:
    """Run one epoch, and print the peaks as one JSON line."""
    configure_logs(json=False)
    with (
        TemporaryDirectory(prefix="tidegate-memory-") as folder,
        contextlib.redirect_stdout(sys.stderr),
    ):
        write_input(Path(folder, "inbox"), rows, columns)
        found: dict[str, list[int]] = {}
        done = run(
            make_spec(job, columns), Path(folder), on_epoch=lambda: found.update(list_peaks())
        )
    if done["rows"] != rows:
        sys.exit(f"read {done['rows']:,} of {rows:,} rows")
    print(json.dumps({"peaks": found, "epochs": done["epochs"]}))


def main() -> None:
    """Measure each job over each number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[4_000_000, 40_000_000])
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument(
        "--jobs", nargs="+", choices=sorted(JOBS), default=["windows", "default", "order"]
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        measure_epoch(given.jobs[0], given.rows[0], given.columns)
        return
    print(
        f"{'job':<10}{'rows':>12}{'driver':>8}{'JVM':>8}{'largest worker':>16}{'epoch s':>9}  (MB)"
    )
    for job in given.jobs:
        for rows in given.rows:
            command = [sys.executable, "-m", "tests.bench.memory", "--child", "--jobs", job]
            command += ["--rows", str(rows), "--columns", str(given.columns)]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(answer.stdout.splitlines()[-1])
            driver, jvm, workers = (found["peaks"][kind] for kind in ("driver", "jvm", "worker"))
            print(
                f"{job:<10}{rows:>12,}{max(driver):>8}{max(jvm):>8}{max(workers):>16}"
                f"{found['epochs'][0]:>9.1f}"
            )


if __name__ == "__main__":
    main()
