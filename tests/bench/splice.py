"""What a merge costs against computing everything again.

Late rows of a large run that touch a share of its windows.

    python -m tests.bench.splice --rows 20000000 --share 0.01

Runs the ordered job with its windows on Spark over generated rows, to published tables: that is the
full run. A fiftieth of the rows comes at its end, so all of them are late. Then it asks for late
rows from the middle of the stream, as many as touch the share of the window results, and merges
them. Prints the table of docs/measurements.md.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.bench.generate import KEYS, SOURCES, T0, generate
from tests.bench.ours import bench_spec, measure
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.driver.log_output import configure_logs
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.splice.merge import MergeDecision, estimate_impact, merge_request
from tidegate.jobs.splice.request_creation import (
    LateFilter,
    RequestOptions,
    create_from_late_rows,
    list_pending_rows,
)

_WINDOW = 10_000_000


def offline(folder: Path, rows: int) -> None:
    """One more file for each source, which comes last.

    A fiftieth of all rows, from all over the time before.
    """
    dice = np.random.default_rng(2)
    span = rows // SOURCES * 900
    for source in range(SOURCES):
        count = rows // SOURCES // 50
        table = pa.table(
            {
                "source": pa.array(np.full(count, source, dtype=np.int32)),
                "seq": pa.array(np.arange(count) + rows),
                "event_time": pa.array(
                    T0 + dice.integers(0, span, count), pa.timestamp("us", "UTC")
                ),
                "key": pa.array(dice.integers(0, KEYS, count).astype(np.int32)),
                "value": pa.array(dice.integers(0, 1_024, count) / 1_024.0),
            }
        )
        pq.write_table(table, folder / f"s{source}" / "part-99999.parquet")


def until(spec: PipelineSpec, log: SlotLog, since: int, results: int) -> int:
    """The event time up to which late rows from `since` on touch so many results."""
    late = list_pending_rows(spec, log, LateFilter(since=since))
    late = late.sort_by("event_time")
    times = late["event_time"].cast(pa.int64()).to_pylist()
    touched: set[tuple[int, int]] = set()
    for key, at in zip(late["key"].to_pylist(), times, strict=True):
        touched.add((key, at // _WINDOW))
        if len(touched) >= results:
            return int(at) + 1
    return int(times[-1]) + 1


def merged(
    spec: PipelineSpec, log: SlotLog, folder: Path, share: float, number: int
) -> dict[str, Any]:
    """One request and its merge, in seconds of clock and processor."""
    store = log.store
    published = read_table(spec, store, "per_key", current_only=True, columns=("window_start",))
    starts = sorted(set(published["window_start"].cast(pa.int64()).to_pylist()))
    since = starts[len(starts) * (number + 1) // 4]
    end = until(spec, log, since, round(share * published.num_rows))
    sink = IcebergSink(spec, store, ensure_identity(store, spec.name))
    begun, spent = time.monotonic(), time.process_time()
    request = create_from_late_rows(
        spec, log, LateFilter(since=since, until=end), RequestOptions("bench")
    )
    asked = time.monotonic()
    _, impact = estimate_impact(spec, log, request)
    shown = time.monotonic()
    outcome = merge_request(spec, log, request.id, MergeDecision("bench", digest=impact.digest))
    sealed = time.monotonic()
    sink.follow(log)
    assert outcome.actual == impact.digest
    touched = sum(t.changed + t.added for t in impact.tables if t.table != "events")
    return {
        "late rows": request.row_count,
        "results": touched,
        "of all": f"{touched / published.num_rows:.2%}",
        "rows read": int(impact.cost["rows_read"]),
        "rows written": int(impact.cost["rows_written"]),
        "ask s": asked - begun,
        "report s": shown - asked,
        "merge s": sealed - shown,
        "publish s": time.monotonic() - sealed,
        "cpu s": time.process_time() - spent,
    }


def exact(spec: PipelineSpec, store: LocalStore) -> bool:
    """Whether events are in order with contiguous positions after all."""
    events = read_table(spec, store, "events", columns=("position", "event_time"))
    times = events["event_time"].cast(pa.int64()).to_numpy()
    same = bool((events["position"].to_numpy() == range(events.num_rows)).all())
    return same and bool(
        pc.all(pc.greater_equal(pa.array(times[1:]), pa.array(times[:-1]))).as_py()
    )


def main(arguments: list[str] | None = None) -> int:
    """Run, merge, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--merges", type=int, default=3)
    chosen = parser.parse_args(arguments)
    configure_logs(json=False)
    with TemporaryDirectory(prefix="tidegate-splice-bench-") as folder:
        place = Path(folder)
        generate(place / "input", chosen.rows, chosen.files)
        offline(place / "input", chosen.rows)
        spec = bench_spec("both", {})
        with contextlib.redirect_stdout(sys.stderr):
            full = measure(spec, place / "input", place / "store")
        store = LocalStore(place / "store")
        log = SlotLog(store, spec.name)
        print(
            f"full run: {full['rows']:,} rows, {full['seconds']:.1f} s, {full['cpu']:.1f} s of"
            " processor time",
            flush=True,
        )
        lines = [
            merged(spec, log, place / "work", chosen.share, number)
            for number in range(chosen.merges)
        ]
        for line in lines:
            seconds = line["ask s"] + line["report s"] + line["merge s"] + line["publish s"]
            line |= {
                "of a full run": f"{seconds / full['seconds']:.1%}",
                "cpu of it": f"{line['cpu s'] / full['cpu']:.1%}",
            }
        print("| " + " | ".join(lines[0]) + " |\n|" + "---:|" * len(lines[0]))
        for line in lines:
            print("| " + " | ".join(_cell(value) for value in line.values()) + " |")
        if not exact(spec, store):
            print("the events are not in order with contiguous positions")
            return 1
    return full["code"] if isinstance(full["code"], int) else 1


def _cell(value: Any) -> str:
    return (
        f"{value:,.2f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


if __name__ == "__main__":
    sys.exit(main())
