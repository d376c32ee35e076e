"""Late rows merged while a driver runs, on real Spark and MinIO.

It goes on sealing, and at the end nothing was lost.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.e2e.drivers import Piped, wait_for
from tests.servers.minio import RealMinio

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

START = datetime(2026, 3, 1, tzinfo=UTC)
EARLY = 12
SPEC = """\
apiVersion: tidegate/v1
name: live
sources:
  north: &source
    path: inbox/north/
    schema: {at: timestamp, item: string, amount: long}
    event_time: at
    lag: 10s
    limits: {objects: 1}
    bounded: true
  south: {<<: *source, path: inbox/south/}
coalesce: {idle_timeout: never}
release: {mode: ordered}
windows:
  per_minute: {kind: tumbling, size: 1m, keys: [item], aggregates: {n: count(*), total: sum(amount), most: max(amount)}}
streams:
  totals: {schema: {item: string, total: long}}
reducers:
  sum: {from: events, to: totals, keys: [item], aggregates: {total: sum(amount)}, inherit: true}
checkpoint: {idle_interval: 100ms}
spark: {driver_memory: 1g, jvm: quick}
"""


class Live(Piped):
    """A pipeline that is fed while it runs."""

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder, SPEC, url)
        self.dice, self.given = random.Random(3), list[Any]()

    def feed(self, first: int, end: int) -> None:
        """One object a source and minute; every eighth row is up to four minutes behind."""
        store = self.store()
        for minute in range(first, end):
            for source in ("north", "south"):
                behind = [
                    self.dice.randrange(240) if self.dice.random() < 0.12 else 0 for _ in range(30)
                ]
                stamps = [
                    START + timedelta(seconds=max(0, 60 * minute + self.dice.randrange(60) - late))
                    for late in behind
                ]
                rows = pa.table(
                    {
                        "at": pa.array(stamps, pa.timestamp("us", tz="UTC")),
                        "item": [self.dice.choice("abc") for _ in stamps],
                        "amount": pa.array([self.dice.randrange(100) for _ in stamps], pa.int64()),
                    }
                )
                self.given.append(rows)
                buffer = io.BytesIO()
                pq.write_table(rows, buffer)
                store.put(f"inbox/{source}/{minute:05d}.parquet", buffer.getvalue())

    def end(self) -> None:
        """No more objects come."""
        for source in ("north", "south"):
            self.store().put(f"inbox/{source}/_DONE", b"")

    def tidegate(self, *arguments: str) -> dict[str, Any]:
        """A command of a user, and what it says."""
        command = [
            sys.executable,
            "-m",
            "tidegate.jobs.cli",
            *arguments,
            "--store",
            self.store_url,
            "--json",
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=900,
            cwd=self.folder,
            env=os.environ,
            check=False,
        )
        said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        assert done.returncode == 0, said
        data: dict[str, Any] = said["data"]
        return data

    def merge(self, *which: str) -> dict[str, Any]:
        """Ask for late rows, and merge them."""
        request = self.tidegate("splice", "late", str(self.spec_file), *which)["request"]
        merged = self.tidegate("splice", "merge", str(self.spec_file), request, "--yes")
        assert merged["promised"] == merged["actual"]
        return merged


# In CI, `tests/splice/test_live.py` lets merges race a driver, without Spark.
@pytest.mark.long
def test_merges_during_a_live_driver(tmp_path: Path, minio_environment: RealMinio) -> None:
    """Merges into events, windows and a stream while epochs are sealed.

    Their results stay, and all equals a batch at the end.
    """
    live = Live(tmp_path / "live", f"s3://{minio_environment.bucket}/splice-live")
    live.feed(0, EARLY)
    driver = live.start()
    log = live.log()
    wait_for(lambda: log.head().slot >= EARLY, driver)
    begun, minute = log.head().slot, EARLY
    with ThreadPoolExecutor(1) as pool:
        merging = pool.submit(live.merge, "--until", (START + timedelta(minutes=6)).isoformat())
        while not merging.done():  # the driver has always something to seal, but not forever
            if log.head().slot >= minute:
                live.feed(minute, minute + 1)
                minute += 1
            time.sleep(0.05)
        merged = merging.result()
    live.feed(minute, minute + 2)
    live.end()
    assert driver.wait(timeout=900) == 0, live.log_text()
    last = live.merge()
    slots = [int(str(found["checkpoint"]).split("-")[1]) for found in (merged, last)]
    head = log.head()
    driven = [
        f.epoch.slot
        for f in log.epochs_between(head.timeline, begun, head.slot)
        if "splice" not in f.epoch.notes
    ]
    facts = f"merged in slots {slots} (lost {merged['slots_lost']}, {merged['seconds']} s)"
    sys.stdout.write(f"{facts}, the driver's slots meanwhile: {driven}\n")
    assert any(slot < slots[0] for slot in driven), (
        "the driver went on sealing while the merge was made"
    )
    assert any(slots[0] < slot for slot in driven), "and above it"
    assert live.exact().problems == []
    given = pa.concat_tables(live.given)
    events = live.table("events").sort_by("position")
    assert events.num_rows == given.num_rows
    assert events["at"].cast(pa.int64()).to_pylist() == sorted(
        given["at"].cast(pa.int64()).to_pylist()
    )
    running: dict[str, int] = {}
    expected = []
    for item, amount in zip(events["item"].to_pylist(), events["amount"].to_pylist(), strict=True):
        running[item] = running.get(item, 0) + amount
        expected.append((item, running[item]))
    totals = live.table("totals")
    assert (
        list(zip(totals["item"].to_pylist(), totals["total"].to_pylist(), strict=True)) == expected
    )
    assert totals["position"].to_pylist() == list(range(len(expected)))
    assert totals["stream_time"].equals(events["at"])
    batch = given.append_column("minute", pc.floor_temporal(given["at"], unit="minute")).group_by(
        ["minute", "item"]
    )
    wanted = {
        (r["minute"], r["item"]): (r["amount_count"], r["amount_sum"], r["amount_max"])
        for r in _batch(batch)
    }
    assert _results(live) == wanted


def _batch(grouped: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = grouped.aggregate(
        [("amount", "count"), ("amount", "sum"), ("amount", "max")]
    ).to_pylist()
    return rows


def _results(live: Live) -> dict[tuple[Any, str], tuple[int, int, int]]:
    from tidegate.jobs.sinks.published_tables import read_table

    rows = read_table(live.spec, live.store(), "per_minute", current_only=True).to_pylist()
    return {(r["window_start"], r["item"]): (r["n"], r["total"], r["most"]) for r in rows}
