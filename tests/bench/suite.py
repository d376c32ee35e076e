"""Six jobs against other engines, in interleaved rounds: ``make bench``.

``python -m tests.bench.suite [W1 ... W6] [--rows 20000000] [--rounds 5] [--peer JOB:NAME=COMMAND]``

Each round runs every contender of a job once, each in a process of its own, on the same files. The
answers are checked in every round (`tests.bench.answers`); a wrong one ends the bench. ``batch`` is
DuckDB with two threads: one query over all files, without late rows and checkpoints, the limit of
the machine. ``flink`` and ``hazelcast`` are the jobs in ``tests/bench/peers``. What a contender
cannot run is named at the end of each table. ``--without flink`` leaves a contender out.

A further peer is a command. It gets ``--input FOLDER --out FOLDER`` and prints a JSON line with
``job_s``, ``job_cpu_s``, ``peak_rss_mb`` and ``adds_up`` (whether it found its own answer right).
FOLDER has the rows as ``parquet/*.parquet`` in order of arrival, and as ``rows.bin``: records of
int64 event time, float64 value, int64 seq, int32 source, int32 key, little endian.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.bench.answers import check_answer
from tests.bench.generate import KEYS, ROW_GROUP, SOURCES, TRIGGER_ROWS, generate
from tests.bench.jvm_peers import JVM_PEERS, prepare, run_peer
from tests.bench.meter import cpu_seconds, peak_megabytes
from tests.bench.rounds import PER_KEY, require


@dataclass(frozen=True)
class Job:
    """A job of the bench.

    Attributes:
        name: of the pipeline in `tests.bench.ours`, and of the query in `tests.bench.plain`.
        title: for people.
        peers: contenders besides tidegate.
        batch: what DuckDB does with all rows at once.
        keys: number of keys in the input.
        copies: windows that a row is in.
    """

    name: str
    title: str
    batch: str
    peers: tuple[str, ...] = ("plain", "flink", "hazelcast", "batch")
    keys: int = KEYS
    copies: int = 1


_SESSIONS: Final = """select key, min(event_time), count(*), sum(value) from (
    select *, sum(first) over (partition by key order by event_time) as session from (
        select *, coalesce(event_time - lag(event_time) over (partition by key order by event_time)
            > interval 1 second, true)::int as first from rows)) group by key, session"""
JOBS: Final = {
    "W1": Job("windows", "10 s windows", f"select {PER_KEY} from rows group by all"),
    "W2": Job(
        "sliding",
        "60 s windows that slide by 10 s",
        "select w - d as w, key, sum(n), sum(s) from (select"
        f" {PER_KEY} from rows group by all), (select unnest(range(6)) * 10000000 as d) group by all",
        copies=6,
    ),
    "W3": Job("sessions", "sessions, gap 1 s", _SESSIONS),
    "W4": Job(
        "order",
        "ordered release of four sources",
        "from rows order by event_time",
        ("flink", "batch"),
    ),
    "W5": Job("pass", "pass-through", "from rows"),
    "W6": Job(
        "keys",
        "10 s windows, 100,000 keys, 3 min lateness with revisions",
        f"select {PER_KEY} from rows group by all",
        keys=100_000,
    ),
}

_CANNOT: Final = {
    ("order", "plain"): "Structured Streaming does not sort a stream in append mode",
    ("order", "hazelcast"): "Hazelcast's pipelines sort batches only",
}
_RECORD: Final = {
    "event_time": "<i8",
    "value": "<f8",
    "seq": "<i8",
    "source": "<i4",
    "key": "<i4",
}


def run_contender(
    job: Job, name: str, source: Path, out: Path, peers: Mapping[str, str]
) -> dict[str, Any]:
    """One run: what it took, after its answer was checked."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    programs = {
        "tidegate": ["-m", "tests.bench.ours", job.name, str(source), str(out)],
        "plain": ["-m", "tests.bench.plain", str(source), str(out), job.name],
        "batch": ["-m", "tests.bench.suite", "--batch", job.name, str(source), str(out)],
    }
    command = [sys.executable, *programs.get(name, [])]
    if name in peers:
        shared = prepare_for_peers(source)
        command = [*shlex.split(peers[name]), "--input", str(shared), "--out", str(out)]
    with (out.parent / f"{job.name}-{name}.log").open("ab") as log:
        if name in JVM_PEERS:
            found = run_peer(name, job.name, prepare_for_peers(source), out, log)
            return {**found, "answer": check_answer(job, name, source, out, found)}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, check=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    if name in peers:
        require(found["adds_up"], f"{name}: its rows do not add up")
        figures = {"seconds": "job_s", "cpu": "job_cpu_s", "peak_mb": "peak_rss_mb"}
        return {ours: found[theirs] for ours, theirs in figures.items()}
    return {**found, "answer": check_answer(job, name, source, out, found)}


def run_batch(name: str, source: Path, out: Path) -> dict[str, Any]:
    """One query of DuckDB over all files, to Parquet. What it took."""
    job = next(job for job in JOBS.values() if job.name == name)
    with duckdb.connect() as db:
        db.execute("set timezone = 'UTC'; set threads = 2; set memory_limit = '8GB'")
        begun, spent = time.monotonic(), cpu_seconds()
        db.execute(f"create view rows as select * from '{source}/s*/*.parquet'")
        db.execute(
            f"copy ({job.batch}) to '{out}/result.parquet' (format parquet, compression snappy)"
        )
        seconds, cpu = time.monotonic() - begun, cpu_seconds() - spent
    return {"seconds": round(seconds, 2), "cpu": round(cpu, 2), "peak_mb": peak_megabytes()}


def prepare_for_peers(source: Path) -> Path:
    """The same rows as other programs take them, beside the input; made once.

    They read sources as one stream, so the rows of all four alternate: file after file, all but a
    quarter would be late.
    """
    shared = source.with_name(f"{source.name}-peers")
    if shared.exists():
        return shared
    work = source.with_name(f".{shared.name}")
    (work / "parquet").mkdir(parents=True)
    with (work / "rows.bin").open("wb") as out:
        for name in sorted({file.name for file in source.glob("s*/*.parquet")}):
            tables = [pq.read_table(file) for file in sorted(source.glob(f"s*/{name}"))]
            turns = np.arange(sum(table.num_rows for table in tables))
            both = pa.concat_tables(tables).take(turns.reshape(len(tables), -1).T.ravel())
            pq.write_table(both, work / "parquet" / name, row_group_size=ROW_GROUP)
            rows = np.empty(both.num_rows, dtype=np.dtype(list(_RECORD.items())))
            for column, kind in _RECORD.items():
                values = both[column].to_numpy()
                is_time = column == "event_time"
                rows[column] = values.astype("datetime64[us]" if is_time else kind).astype(kind)
            out.write(rows.tobytes())
    work.rename(shared)
    return shared


def report(job: Job, rounds: list[dict[str, dict[str, Any]]]) -> Iterator[str]:
    """A table of medians, and tidegate's throughput against each peer within the rounds."""
    yield f"## {job.title}"
    yield "| | seconds, by round | processor seconds | peak MB | tidegate against it (min, median, max) |"
    yield "|---|---|---|---|---|"
    for name in rounds[0]:
        runs = [one[name] for one in rounds]
        ratios = sorted(one[name]["seconds"] / one["tidegate"]["seconds"] for one in rounds)
        ratio = (
            ""
            if name == "tidegate"
            else f"{ratios[0]:.2f}, {statistics.median(ratios):.2f}, {ratios[-1]:.2f} x"
        )
        seconds = ", ".join(f"{run['seconds']:.1f}" for run in runs)
        cpu = statistics.median(run["cpu"] for run in runs)
        yield f"| {name} | {seconds} | {cpu:.1f} | {max(run['peak_mb'] for run in runs):,} | {ratio} |"
    for (own, name), reason in _CANNOT.items():
        if own == job.name:
            yield f"{name}: not run; {reason}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", choices=[*JOBS, []], help="default: all")
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="append", default=[], metavar="JOB:NAME=COMMAND")
    parser.add_argument("--without", action="append", default=[], choices=Job("", "", "").peers)
    parser.add_argument("--work", type=Path, help="keep input and the last outputs here")
    parser.add_argument("--batch", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.batch:
        print(json.dumps(run_batch(given.batch[0], Path(given.batch[1]), Path(given.batch[2]))))
        return
    peers: dict[str, dict[str, str]] = {}
    for text in given.peer:
        place, _, command = text.partition("=")
        code, _, name = place.partition(":")
        peers.setdefault(code, {})[name] = command
    with TemporaryDirectory(prefix="tidegate-bench-") as scratch:
        for code in given.jobs or JOBS:
            run_job(JOBS[code], given, (given.work or Path(scratch)).resolve(), peers.get(code, {}))


def run_job(job: Job, given: argparse.Namespace, work: Path, peers: Mapping[str, str]) -> None:
    """All rounds of one job, and its report."""
    source = work / f"input-{given.rows}-{job.keys}"
    if not source.exists():
        generate(source, given.rows, max(1, given.rows // TRIGGER_ROWS), keys=job.keys)
    rounds: list[dict[str, dict[str, Any]]] = []
    names = [name for name in ("tidegate", *job.peers, *peers) if name not in given.without]
    for name in JVM_PEERS.keys() & set(names):
        prepare(name)  # before the first clock starts
    for number in range(given.rounds):
        # No contender always goes first.
        order = names if number % 2 == 0 else names[::-1]
        found = {}
        for name in order:
            found[name] = run_contender(job, name, source, work / "run" / name, peers)
            took, load = found[name], os.getloadavg()[0]
            print(
                f"round {number + 1}: {name} {took['seconds']:.1f} s, load {load:.1f}; {took.get('answer', 'adds up')}",
                flush=True,
            )
        rounds.append({name: found[name] for name in names})
    print(
        f"{given.rows:,} rows, {given.rounds} interleaved rounds, {os.cpu_count()} cores, {SOURCES} sources"
    )
    print("\n".join(report(job, rounds)), flush=True)


if __name__ == "__main__":
    main()
