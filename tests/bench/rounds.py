"""Throughput against plain Structured Streaming, in interleaved rounds.

``make bench-windows`` and ``make bench-order``.

``python -m tests.bench.rounds windows|order [--rows 20000000] [--rounds 5] [--work FOLDER]``

Each round runs every contender once, one after the other, each in a process of its own on the same
files, so that what else the machine does meets all alike; the figure is the median of the rounds'
ratios. After the first round the answers are checked: rows in windows plus late rows are the input,
per key and window; ordered events are sorted, and with the late rows they are the input.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import duckdb

from tests.bench.generate import TRIGGER_ROWS, generate

_CONTENDERS: Final[dict[str, tuple[str, ...]]] = {
    "windows": ("windows", "plain"),
    "order": ("order", "windows", "plain"),
}
WIDTH: Final = 10_000_000
PER_KEY: Final = (
    f"epoch_us(event_time) // {WIDTH} * {WIDTH} as w, key, count(*) as n, sum(value) as s"
)


def contend(name: str, source: Path, out: Path) -> dict[str, Any]:
    """One run of one contender; its own measurement."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    program = ["tests.bench.plain"] if name == "plain" else ["tests.bench.ours", name]
    with (out.parent / f"{name}.log").open("ab") as log:
        done = subprocess.run(
            [sys.executable, "-m", *program, str(source), str(out)],
            stdout=subprocess.PIPE,
            stderr=log,
            check=True,
            text=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(name: str, source: Path, out: Path) -> str:
    """Whether the answer is right, as a sentence."""
    with duckdb.connect() as db:
        db.execute("set timezone = 'UTC'; set threads = 2")
        db.execute(f"create view input as select * from '{source}/s*/*.parquet'")
        total = scalar(db, "select count(*) from input")
        if name == "plain":
            kept = scalar(db, f"select coalesce(sum(n), 0) from '{out}/windows/*.parquet'")
            return (
                f"{kept:,} of {total:,} rows in windows; the others were dropped or stand in"
                " windows that never closed"
            )
        tables = out / f"bench_{name}" / "timelines" / "0" / "tables"
        any_late = any(tables.glob("late/*/*"))

        def late_for(output: str) -> str:
            if not any_late:
                return "(from input limit 0)"
            return f"(select * from '{tables}/late/*/*.parquet' where output = '{output}')"

        said = []
        if name in ("order", "both"):
            said.append(_order(db, total, f"'{tables}/events/*/*.parquet'", late_for("events")))
        if name != "order":
            late = late_for("per_key")
            said.append(_windows(db, total, f"'{tables}/per_key/*/*.parquet'", late))
        return "; ".join(said)


def _windows(db: duckdb.DuckDBPyConnection, total: int, windows: str, late: str) -> str:
    found = f"""select w, key, sum(n) as n, sum(s) as s from (
            select epoch_us(window_start) as w, key, n, s from {windows}
            union all select {PER_KEY} from {late} group by all) group by all"""
    expected = f"select {PER_KEY} from input group by all"
    differing = scalar(
        db,
        f"select count(*) from ({found}) a full join ({expected}) b using (w, key) where a.n is"
        " distinct from b.n or a.s <> b.s",
    )
    rows, kept = (
        scalar(db, f"select count(*) from {late}"),
        scalar(db, f"select sum(n) from {windows}"),
    )
    require(
        differing == 0 and rows + kept == total,
        f"{differing} windows differ; {kept} + {rows} late of {total}",
    )
    return (
        f"{kept:,} rows in windows + {rows:,} late rows kept = {total:,}, every key and window"
        " exact"
    )


def _order(db: duckdb.DuckDBPyConnection, total: int, events: str, late: str) -> str:
    unsorted = scalar(
        db,
        "select count(*) from (select event_time < lag(event_time) over (order by position) as x"
        f" from {events}) where x",
    )
    rows, kept = (
        scalar(db, f"select count(*) from {late}"),
        scalar(db, f"select count(distinct position) from {events}"),
    )
    require(
        unsorted == 0 and rows + kept == total,
        f"{unsorted} out of order; {kept} + {rows} late of {total}",
    )
    return f"{kept:,} rows in order + {rows:,} late rows kept = {total:,}"


def require(right: bool, what: str) -> None:
    """End the bench when an answer is wrong."""
    if not right:
        raise SystemExit(f"WRONG ANSWER: {what}")


def scalar(db: duckdb.DuckDBPyConnection, sql: str) -> int:
    """The one number a query gives; 0 for none."""
    row = db.execute(sql).fetchone()
    return int(row[0]) if row and row[0] is not None else 0


def report(job: str, rounds: Sequence[dict[str, dict[str, Any]]]) -> str:
    """Medians and ratios as a Markdown table and sentences."""
    names = _CONTENDERS[job]
    lines = [
        "| round | " + " | ".join(f"{name} s" for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for number, one in enumerate(rounds, 1):
        lines.append(
            f"| {number} | " + " | ".join(f"{one[name]['seconds']:.1f}" for name in names) + " |"
        )
    lines.append(
        "| median | " + " | ".join(f"{_median(rounds, name):.1f}" for name in names) + " |"
    )
    warm = " | ".join(f"{statistics.median(_warm(rounds, name)):.2f}" for name in names)
    lines.append(f"| warm epoch or batch | {warm} |")
    lines.append(
        "| processor time | "
        + " | ".join(f"{_median(rounds, name, 'cpu'):.1f}" for name in names)
        + " |"
    )
    ours, peer = names[0], names[-1] if job == "windows" else "windows"
    ratios = [one[peer]["seconds"] / one[ours]["seconds"] for one in rounds]
    if job == "windows":
        lines.append(
            f"throughput against plain: {statistics.median(ratios):.2f} x (rounds: {_list(ratios)})"
        )
    else:
        lines.append(
            f"ordered release takes {statistics.median([1 / r for r in ratios]):.2f} x the windows'"
            " time"
        )
    return "\n".join(lines)


def _median(rounds: Sequence[dict[str, dict[str, Any]]], name: str, what: str = "seconds") -> float:
    return float(statistics.median(one[name][what] for one in rounds))


def _warm(rounds: Sequence[dict[str, dict[str, Any]]], name: str) -> list[float]:
    return [seconds for one in rounds for seconds in one[name]["epochs"][1:]] or [0.0]


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=sorted(_CONTENDERS))
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="keep input and the last outputs here")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="tidegate-bench-") as scratch:
        work = (given.work or Path(scratch)).resolve()
        source = work / f"input-{given.rows}"
        if not source.exists():
            generate(source, given.rows, max(1, given.rows // TRIGGER_ROWS))
        rounds: list[dict[str, dict[str, Any]]] = []
        for number in range(given.rounds):
            names = _CONTENDERS[given.job]
            rounds.append({})
            for name in names if number % 2 == 0 else reversed(names):  # no one always goes first
                rounds[-1][name] = contend(name, source, work / name)
                print(
                    f"round {number + 1}: {name} {rounds[-1][name]['seconds']:.1f} s, load"
                    f" {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
                if number == 0:
                    print(f"  {check(name, source, work / name)}", flush=True)
        print(f"{given.rows:,} rows, {given.rounds} interleaved rounds, {os.cpu_count()} cores")
        print(report(given.job, rounds))


if __name__ == "__main__":
    main()
