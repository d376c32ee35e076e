"""The flights of 2013 with lag 0.

Every late row kept, merged back in several requests, and compared with the batch result.

    python -m tests.splice.flights_proof --days 365 --hours 168 --requests 8
    python -m tests.splice.flights_proof --days 365 --hours 168 --mover spark

Prints the table of docs/measurements.md; exit code 1 if a single value differs.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from tests.engine.harness import PlainSteps
from tests.manual_clock import ManualClock
from tests.oracle.mover import OracleMover

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.infra.flights import AIRPORTS, FlightsFeed
from tidegate.jobs.engine.epoch_engine import Engine, EngineRuntime, EpochPorts
from tidegate.jobs.engine.interfaces import Mover, NoFaults
from tidegate.jobs.engine.manifest_writer import ManifestAuthor
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.output_tables import DriverTables
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.splice.merge import MergeDecision, estimate_impact, merge_request
from tidegate.jobs.splice.request_creation import (
    LateFilter,
    RequestOptions,
    create_from_late_rows,
    list_pending_rows,
)

COLUMNS = {
    "event_time": "timestamp",
    "carrier": "string",
    "flight": "long",
    "origin": "string",
    "dep_delay": "long",
    "distance": "long",
}
AGGREGATES = {
    "flights": "count(*)",
    "delay": "sum(dep_delay)",
    "worst": "max(dep_delay)",
    "mean": "avg(distance)",
}
BATCH = (
    'count(*) flights, sum(dep_delay) delay, max(dep_delay) worst, avg(cast("distance" as double))'
    " mean"
)


def spec_of() -> PipelineSpec:
    """Three airports in order of actual departure, no lag: a flight that leaves late is late."""
    source = {"schema": COLUMNS, "event_time": "event_time", "lag": 0, "limits": {"objects": 1}}
    source["punctuation"] = {"every_events": 1}  # judged record by record, whatever the cut
    windows = {
        "per_hour": {
            "kind": "tumbling",
            "size": "1h",
            "keys": ["origin"],
            "aggregates": AGGREGATES,
        },
        "per_carrier_day": {
            "kind": "tumbling",
            "size": "1d",
            "keys": ["carrier"],
            "aggregates": AGGREGATES,
        },
    }
    sources = {airport: {**source, "path": f"inbox/{airport}/"} for airport in AIRPORTS}
    return PipelineSpec.model_validate({"name": "flights", "sources": sources, "windows": windows})


def buckets(days: int, hours: int) -> Iterator[dict[str, pa.Table]]:
    """Departures by airport, some hours of arrival at a time."""
    found: dict[int, dict[str, list[pa.Table]]] = {}
    for item in FlightsFeed("2013-01-01", days).objects():
        rows = item.table.filter(pa.compute.equal(item.table["kind"], "data")).select(list(COLUMNS))
        bucket = int(item.hour.timestamp()) // (3600 * hours)
        found.setdefault(bucket, {}).setdefault(item.airport, []).append(rows)
    for bucket in sorted(found):
        yield {airport: pa.concat_tables(parts) for airport, parts in found[bucket].items()}


class Proof:
    """One store, one run, some merges."""

    def __init__(self, folder: Path, mover: str) -> None:
        self.spec, self.store = spec_of(), LocalStore(folder / "store")
        self.log = SlotLog(self.store, self.spec.name)
        self.uid = ensure_identity(self.store, self.spec.name)
        self.sink = IcebergSink(self.spec, self.store, self.uid)
        self.mover = _mover(mover, self.store, self.spec, folder / "mover")
        self.inputs: list[pa.Table] = []

    def run(self, days: int, hours: int) -> float:
        """The stream, epoch by epoch; seconds."""
        clock = ManualClock()
        engine = Engine(
            self.spec,
            self.log,
            EpochPorts(
                [ObjectSource(name, src, self.store) for name, src in self.spec.sources.items()],
                self.mover,
                DriverTables(self.store).write,
            ),
            EngineRuntime(
                ManifestAuthor(self.uid, "driver", "0"), PlainSteps(clock), clock, NoFaults()
            ),
        )
        begun = time.monotonic()
        for number, bucket in enumerate(chain(buckets(days, hours), self._far())):
            for airport, rows in bucket.items():
                buffer = io.BytesIO()
                pq.write_table(rows, buffer)
                self.store.put(f"inbox/{airport}/{number:06d}.parquet", buffer.getvalue())
                self.inputs.append(rows)
            clock.advance(1.0)
            engine.run_epoch()
        self.sink.follow(self.log)
        return time.monotonic() - begun

    def _far(self) -> Iterator[dict[str, pa.Table]]:
        """A flight in 2033 from each airport closes every window before it."""
        stamp = pa.array([2_000_000_000_000_000], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
        row = {
            "event_time": stamp,
            "carrier": ["ZZ"],
            "flight": [0],
            "dep_delay": [0],
            "distance": [1],
        }
        schema = self.inputs[0].schema
        yield {
            a: pa.table({**row, "origin": [a]}).select(schema.names).cast(schema) for a in AIRPORTS
        }

    def merges(self, requests: int) -> Iterator[dict[str, Any]]:
        """Late rows, a stretch of event time at a time."""
        times = sorted(
            list_pending_rows(self.spec, self.log, LateFilter())["event_time"]
            .cast(pa.int64())
            .to_pylist()
        )
        cuts = [None, *(times[len(times) * n // requests] for n in range(1, requests)), None]
        for since, until in pairwise(cuts):
            begun = time.monotonic()
            request = create_from_late_rows(
                self.spec, self.log, LateFilter(since=since, until=until), RequestOptions("proof")
            )
            asked = time.monotonic()
            _, impact = estimate_impact(self.spec, self.log, request)
            outcome = merge_request(
                self.spec, self.log, request.id, MergeDecision("proof", digest=impact.digest)
            )
            sealed = time.monotonic()
            self.sink.follow(self.log)
            assert outcome.actual == impact.digest
            yield {
                "late rows": request.row_count,
                "results changed": sum(
                    t.changed + t.added for t in impact.tables if t.table != "events"
                ),
                "rows read": int(impact.cost["rows_read"]),
                "rows written": int(impact.cost["rows_written"]),
                "ask s": asked - begun,
                "merge s": outcome.seconds,
                "publish s": time.monotonic() - sealed,
            }

    def problems(self) -> list[str]:
        """Every published result against a batch over all departures.

        Every position against the order of the stamps.
        """
        found = []
        with duckdb.connect() as db:
            db.execute("set timezone = 'UTC'")
            db.register("input", pa.concat_tables(self.inputs))
            for name, key, unit in (
                ("per_hour", "origin", "hour"),
                ("per_carrier_day", "carrier", "day"),
            ):
                db.register("published", read_table(self.spec, self.store, name, current_only=True))
                wrong = db.execute(
                    f"""with batch as (
                        select {key}, date_trunc('{unit}', event_time) w, {BATCH} from input where carrier <> 'ZZ' group by all)
                    select count(*) from batch b full join published p on b.{key} = p.{key} and b.w = p.window_start
                    where b.flights is distinct from p.flights or b.delay is distinct from p.delay
                    or b.worst is distinct from p.worst or abs(coalesce(b.mean, -1) - coalesce(p.mean, -1)) > 1e-9 * b.mean"""
                ).fetchall()[0][0]
                total = db.execute("select count(*) from published").fetchall()[0][0]
                print(f"{name}: {total:,} results, {wrong} differ from the batch")
                found += [f"{wrong} results of {name} differ"] if wrong else []
        events = read_table(self.spec, self.store, "events", columns=("position", "event_time"))
        times = events["event_time"].cast(pa.int64()).to_pylist()
        if events["position"].to_pylist() != list(range(len(times))) or times != sorted(times):
            found.append("the stream is not in order with contiguous positions")
        print(f"events: {len(times):,} rows, in order, positions contiguous")
        return found


def _mover(name: str, store: Store, spec: PipelineSpec, work: Path) -> Mover:
    if name == "reference":
        return OracleMover(store, spec)
    from tidegate.jobs.spark.mover import SparkMover

    return SparkMover(store, spec, work)


def main(arguments: list[str] | None = None) -> int:
    """Run, merge, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=31)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--mover", choices=["reference", "spark"], default="reference")
    chosen = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="tidegate-proof-") as folder:
        proof = Proof(Path(folder), chosen.mover)
        seconds = proof.run(chosen.days, chosen.hours)
        late = list_pending_rows(proof.spec, proof.log, LateFilter()).num_rows
        read = proof.log.head().record
        rows = read.counters.read if read else 0
        print(
            f"{rows:,} departures in {proof.log.head().slot:,} epochs ({chosen.mover} mover):"
            f" {seconds:.1f} s; {late:,} rows late"
        )
        table = list(proof.merges(chosen.requests))
        names = list(table[0])
        print("\n| " + " | ".join(names) + " |\n|" + "---:|" * len(names))
        for line in table:
            print(
                "| "
                + " | ".join(
                    f"{line[n]:,.2f}" if isinstance(line[n], float) else f"{line[n]:,}"
                    for n in names
                )
                + " |"
            )
        print()
        problems = proof.problems()
        proof.mover.close()
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
