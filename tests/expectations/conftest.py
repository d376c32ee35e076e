"""One healthy pipeline's evidence, to be broken in one place by each test."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.manifest import Counters, Manifest
from tidegate.expectations.evidence import Evidence
from tidegate.jobs.spec.pipeline import PipelineSpec

if TYPE_CHECKING:
    from tidegate.expectations.gx_runner import RunResult

START = datetime(2013, 1, 9, tzinfo=UTC)
NOW = 1_357_700_000_000_000
SOURCES = ("EWR", "JFK")

LATE = pa.schema(
    [
        ("output", pa.string()),
        ("reason", pa.string()),
        ("lateness_us", pa.int64()),
        ("_source", pa.string()),
        ("_partition", pa.string()),
        ("_seq", pa.int64()),
        ("_epoch", pa.int64()),
    ]
)
DEAD = pa.schema(
    [
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("object", pa.string()),
        ("_source", pa.string()),
        ("_partition", pa.string()),
        ("_seq", pa.int64()),
        ("row", pa.string()),
        ("_epoch", pa.int64()),
    ]
)
BARRIERS = pa.schema(
    [
        ("barrier_id", pa.int64()),
        ("outcome", pa.string()),
        ("types", pa.list_(pa.string())),
        ("homogeneous", pa.bool_()),
        ("missing", pa.list_(pa.string())),
        ("tardy", pa.list_(pa.string())),
        ("participants", pa.string()),
        ("waited_us", pa.int64()),
        ("section", pa.int64()),
        ("_epoch", pa.int64()),
    ]
)


def rows(schema: pa.Schema, *values: dict[str, Any]) -> pa.Table:
    """A table from rows; columns left out are null."""
    return pa.Table.from_pylist(
        [{name: row.get(name) for name in schema.names} for row in values], schema=schema
    )


def manifest(
    slot: int, *, late: int = 1, pending: bool = False, read: int = 50, **more: int
) -> Manifest:
    """A manifest of two sources that read the same; `more` counts of each are by the way."""
    source = {"read": read, "released": read - late, "late": late}
    source |= {name.replace("__", ":"): count for name, count in more.items()}
    return Manifest(
        timeline=0,
        slot=slot,
        pipeline="flights",
        uid="u",
        spec_digest="d",
        code_version="0",
        parent=str(CheckpointId(0, slot - 1, "a" * 12)) if slot > 1 else None,
        parent_sha256="0" * 64 if slot > 1 else None,
        attempt="a" * 12,
        lease_token=1,
        driver="test",
        recorded_now=NOW,
        cut={f"{s}/0": {"pending": pending, "arrived": NOW - 2_000_000} for s in SOURCES},
        counters=Counters(
            read=2 * read,
            released=2 * (read - late),
            late=2 * late,
            per_source={s: dict(source) for s in SOURCES},
        ),
        created_at=NOW + slot,
    )


def arrivals(*ticks: int) -> str:
    """The participants of a barrier, by when they arrived."""
    return json.dumps({f"{s}/0": {"arrived": t} for s, t in zip(SOURCES, ticks, strict=False)})


def checkpoints(count: int = 3) -> pa.Table:
    """Rows of the checkpoints table that conserve."""
    nothing = dict.fromkeys(("rows_dropped", "rows_rejected", "rows_dead", "rows_retained"), 0)
    counted = {"rows_read": 34, "rows_released": 32, "rows_late": 2, **nothing}
    return pa.Table.from_pylist(
        [
            {
                "checkpoint_id": f"t0-{n:06d}-aaaaaaaaaaaa",
                "_epoch": n,
                "sealed_at": START + timedelta(minutes=n),
                "epoch_ms": 800.0,
                "seal_ms": 4.0,
                **counted,
            }
            for n in range(1, count + 1)
        ]
    )


def events(spec: PipelineSpec, count: int = 96) -> pa.Table:
    """Released rows in order."""
    return pa.table(
        {
            "position": pa.array(range(count), pa.int64()),
            "section": pa.array([n // 50 for n in range(count)], pa.int64()),
            "_late": pa.array([False] * count),
            "_source": [SOURCES[n % 2] for n in range(count)],
            "_partition": ["0"] * count,
            "_seq": pa.array(range(count), pa.int64()),
            "_epoch": pa.array([1] * count, pa.int64()),
            "sched": pa.array(
                [START + timedelta(minutes=n % 50) for n in range(count)], pa.timestamp("us", "UTC")
            ),
        }
    )


@pytest.fixture
def spec() -> PipelineSpec:
    source = {
        "schema": {"sched": "timestamp", "carrier": "string"},
        "barriers": {"kind": "carrier", "types": ["day_close"]},
        "event_time": "sched",
        "lag": "1h",
    }
    return PipelineSpec.model_validate(
        {"name": "flights", "sources": {s: {"path": f"inbox/{s}", **source} for s in SOURCES}}
        | {"supervision": {"freshness": "10s", "owner": "ann"}}
    )


@pytest.fixture
def healthy(spec: PipelineSpec) -> Evidence:
    barrier = {
        "outcome": "complete",
        "types": ["day_close"] * 2,
        "homogeneous": True,
        "missing": [],
        "tardy": [],
        "participants": arrivals(0, 10**6),
    }
    late = {"output": "events", "reason": "late_order", "lateness_us": 60_000_000, "_epoch": 1}
    return Evidence(
        spec=spec,
        late=rows(LATE, *({**late, "_source": s} for s in SOURCES)),
        barriers=rows(
            BARRIERS,
            *(
                {**barrier, "waited_us": 10**6, "barrier_id": n, "section": n, "_epoch": n}
                for n in (1, 2, 3)
            ),
        ),
        checkpoints=checkpoints(),
        dead_letters=rows(DEAD),
        events=events(spec),
        events_since=0,
        head=manifest(3),
        manifests=tuple(manifest(n) for n in (1, 2, 3)),
        past=None,
        sealed=3,
        now=NOW + 10_000_000,
        wanted=True,
        verified="healthy",
    )


def changed(evidence: Evidence, **fields: Any) -> Evidence:
    """The evidence with something else in it."""
    return replace(evidence, **fields)


def record(run: RunResult, number: int = 0) -> dict[str, object]:
    """A result as `quality` makes it."""
    failed = [{"id": c.id, "suite": c.suite} for c in run.failed_checks]
    checks = [
        {"id": c.id, "suite": c.suite, "says": c.says, "observed": c.observed, "passed": c.passed, "severity": c.severity,
         "sample": c.sample, "command": c.command,
         "summary": c.summary, "page": c.page_name}
        for c in run.checks
    ]  # fmt: skip
    at = f"2026-11-21T18:00:{number % 60:02d}Z"
    return {"id": f"run{number:03d}", "pipeline": "flights", "at": at, "verdict": run.verdict, "checkpoint": "t0-000003-aaaaaa",
            "failed": failed, "checks": checks}  # fmt: skip
