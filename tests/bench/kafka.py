"""A topic of a real broker through windows: tidegate against plain Structured Streaming.

``make bench-kafka``.

``python -m tests.bench.kafka [--rows 10000000] [--rounds 3] [--work FOLDER]``

The rows of `tests.bench.generate` as JSON messages, a partition for each source, in one topic that
both sides read from its beginning, a fifth of it or 2 M messages an epoch or batch, each in a
process of its own, in turns. Seconds count from a warm session until it has stopped. After each run
its answer is checked against the input: windows and late rows of ours must be the input, per key
and window; of the peer's windows none may have too much, and what it dropped is counted.
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

from tests.bench.generate import SOURCES, TRIGGER_ROWS, generate
from tests.bench.kafka_sides import TOPIC
from tests.bench.rounds import PER_KEY, check, require, scalar
from tests.servers.jars import BROKER, CONNECTOR, ensure_jars, spark_jars
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import KafkaClient

_SIDES: Final = ("ours", "plain")


def play(
    side: str, servers: str, folder: Path, jars: Sequence[Path], *options: str
) -> dict[str, Any]:
    """One side in a process of its own; what it tells."""
    command = [
        sys.executable,
        "-m",
        "tests.bench.kafka_sides",
        side,
        servers,
        str(folder),
        *options,
    ]
    environment = {**os.environ, "TIDEGATE_SPARK_JARS": ",".join(map(str, jars))}
    with (folder.parent / f"{side}.log").open("ab") as log:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=log, check=True, text=True, env=environment
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def dropped(source: Path, out: Path) -> int:
    """Rows of the input that the peer's windows lack.

    A window with too many rows, or one that is nowhere, is an error.
    """
    with duckdb.connect() as db:
        db.execute("set timezone = 'UTC'; set threads = 2")
        db.execute(f"create view input as select * from '{source}/s*/*.parquet'")
        found = (
            f"select epoch_us(w) as w, key, sum(n) as n from '{out}/windows/*.parquet' group by all"
        )
        both = f"({found}) a full join (select {PER_KEY} from input group by all) b using (w, key)"
        too_much = scalar(
            db, f"select count(*) from {both} where coalesce(a.n, 0) > coalesce(b.n, 0)"
        )
        require(too_much == 0, f"{too_much} windows of the peer's have too many rows")
        return scalar(db, f"select sum(b.n - coalesce(a.n, 0)) from {both}")


def report(rows: int, rounds: Sequence[dict[str, dict[str, Any]]]) -> str:
    """A table of rows a second, medians, and the median of the rounds' ratios."""
    lines = ["| round | tidegate rows/s | plain rows/s | ratio |", "|---|---:|---:|---:|"]
    ratios = [turn["plain"]["seconds"] / turn["ours"]["seconds"] for turn in rounds]
    for number, (turn, ratio) in enumerate(zip(rounds, ratios, strict=True), 1):
        cells = " | ".join(f"{rows / turn[side]['seconds']:,.0f}" for side in _SIDES)
        lines.append(f"| {number} | {cells} | {ratio:.2f} |")
    medians = {
        side: statistics.median(rows / turn[side]["seconds"] for turn in rounds) for side in _SIDES
    }
    lines.append(
        f"| median | {medians['ours']:,.0f} | {medians['plain']:,.0f} |"
        f" {statistics.median(ratios):.2f} |"
    )
    warm = {
        side: [s for turn in rounds for s in turn[side]["epochs"][1:]] or [0.0] for side in _SIDES
    }
    lines.append(
        "| warm epoch or batch, s | "
        + " | ".join(f"{statistics.median(warm[side]):.2f}" for side in _SIDES)
        + " | |"
    )
    spent = " | ".join(
        f"{statistics.median(turn[side]['cpu'] for turn in rounds):.1f}" for side in _SIDES
    )
    lines.append(f"| processor time, s | {spent} | |")
    return "\n".join(lines)


def contend(
    side: str, server: KafkaServer, jars: Sequence[Path], source: Path, work: Path, rows: int
) -> dict[str, Any]:
    """One run of one side, and its check."""
    out = work / side
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    found = play(
        side,
        server.servers,
        out,
        jars,
        "--rows",
        str(rows + SOURCES),
        "--batch",
        str(min(TRIGGER_ROWS, rows // 5)),
    )
    require(
        found["rows"] == rows + SOURCES,
        f"{side} read {found['rows']:,} of {rows + SOURCES:,} messages",
    )
    if side == "ours":
        found["checked"] = check("windows", source, out)
    else:
        gone = dropped(source, out)
        found["checked"] = (
            f"{rows - gone:,} rows in windows + {gone:,} dropped for being late = {rows:,}"
        )
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="keep input and the last outputs here")
    given = parser.parse_args()
    broker_jars, jars = ensure_jars("kafka-broker", BROKER), spark_jars("spark-kafka", CONNECTOR)
    with TemporaryDirectory(prefix="tidegate-bench-") as scratch:
        work = (given.work or Path(scratch)).resolve()
        source = work / f"input-{given.rows}"
        if not source.exists():
            generate(source, given.rows, 1)
        server = KafkaServer(broker_jars, Path(scratch) / "broker")
        server.start()
        try:
            client = KafkaClient(broker_jars, server.servers)
            client.topic(TOPIC, SOURCES)
            client.close()
            play("fill", server.servers, source, jars)
            rounds: list[dict[str, dict[str, Any]]] = []
            for number in range(given.rounds):
                rounds.append({})
                for side in (
                    _SIDES if number % 2 == 0 else reversed(_SIDES)
                ):  # no one always goes first
                    found = rounds[-1][side] = contend(side, server, jars, source, work, given.rows)
                    load = os.getloadavg()[0]
                    print(
                        f"round {number + 1}: {side} {found['seconds']:.1f} s, load {load:.1f};"
                        f" {found['checked']}",
                        flush=True,
                    )
        finally:
            server.stop()
        print(f"{given.rows:,} rows, {given.rounds} interleaved rounds, {os.cpu_count()} cores")
        print(report(given.rows, rounds))


if __name__ == "__main__":
    main()
