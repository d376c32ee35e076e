"""Sources in other formats through a real driver.

The tables equal those of the same rows in Parquet.
"""

from __future__ import annotations

import gzip
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.drivers import SIGKILLED, Piped
from tidegate.jobs.sinks.exactness_audit import audit_exactness
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.sources.input_view import InputView

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

START = datetime(2026, 3, 1, tzinfo=UTC)
SPEC = """\
apiVersion: tidegate/v1
name: mixed
sources:
  parquet: &source
    path: inbox/parquet/
    schema: {at: timestamp, item: string, amount: long}
    event_time: at
    lag: 30s
    limits: {objects: 2}
    bounded: true
  csv: {<<: *source, path: inbox/csv/, format: csv, discovery: {order: arrival}}
  json: {<<: *source, path: inbox/json/, format: json, evolution: {renamed: {sum: amount}, added: ignore}}
coalesce: {idle_timeout: never}
windows:
  per_minute: {kind: tumbling, size: 1m, keys: [item], aggregates: {n: count(*), total: sum(amount)}, lateness: 2m}
checkpoint: {idle_interval: 100ms}
spark: {driver_memory: 1g, jvm: quick}
"""
Row = tuple[datetime, str, int]


def rows(object_: int) -> list[Row]:
    """Ten rows of an object."""
    return [(START + timedelta(seconds=20 * object_ + n), "ab"[n % 2], n) for n in range(10)]


def parquet(of: list[Row]) -> bytes:
    """As Parquet."""
    at, item, amount = zip(*of, strict=True)
    table = pa.table(
        {
            "at": pa.array(at, pa.timestamp("us", "UTC")),
            "item": pa.array(item),
            "amount": pa.array(amount, pa.int64()),
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def csv(of: list[Row]) -> bytes:
    """As CSV, compressed, with a line that is not a row."""
    lines = [f"{at.isoformat()},{item},{amount}" for at, item, amount in of]
    return gzip.compress("\n".join(["at,item,amount", *lines, "broken", ""]).encode())


def jsonl(of: list[Row]) -> bytes:
    """As JSON lines under the old name, with a field no one declared and a value that does not fit."""
    lines = [
        json.dumps({"at": at.isoformat(), "item": item, "sum": amount, "x": 1})
        for at, item, amount in of
    ]
    return "\n".join([*lines, json.dumps({"at": of[0][0].isoformat(), "sum": "many"})]).encode()


def test_formats_agree_through_a_kill(tmp_path: Path) -> None:
    """The same rows in three formats give equal events.

    Bad rows are dead letters; the check finds everything exact.
    """
    mixed = Piped(tmp_path / "p", SPEC)
    for name, encode, ending in (
        ("parquet", parquet, "parquet"),
        ("csv", csv, "csv.gz"),
        ("json", jsonl, "json"),
    ):
        folder = mixed.inbox / "inbox" / name
        folder.mkdir(parents=True)
        for number in range(6):
            (folder / f"{number:03d}.{ending}").write_bytes(encode(rows(number)))
        (folder / "_DONE").touch()
    assert mixed.run("move.done:2") == SIGKILLED, mixed.log_text()
    assert mixed.run() == 0, mixed.log_text()
    events = mixed.table("events").to_pylist()
    found = {
        name: sorted((r["at"], r["item"], r["amount"]) for r in events if r["_source"] == name)
        for name in mixed.spec.sources
    }
    wanted = sorted(row for number in range(6) for row in rows(number))
    assert found == {"parquet": wanted, "csv": wanted, "json": wanted}
    assert sum(row["n"] for row in mixed.table("per_minute").to_pylist()) == 3 * len(wanted)
    dead = mixed.table("dead_letters").to_pylist()
    assert sorted({(r["_source"], r["detail"]) for r in dead}) == [
        ("csv", "the line has more or fewer values than there are columns"),
        ("json", "amount is no long: many"),
    ]
    assert len(dead) == 12
    store = mixed.store()
    view = InputView(store, mixed.spec, tmp_path / "view")
    exact = audit_exactness(
        mixed.spec,
        view,
        mixed.log(),
        lambda name: read_table(mixed.spec, store, name, current_only=True),
    )
    assert exact.problems == []
    assert {r["object"] for r in dead if r["_source"] == "csv"} == {
        f"inbox/csv/{n:03d}.csv.gz" for n in range(6)
    }
