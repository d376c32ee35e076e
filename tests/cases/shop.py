"""A small pipeline whose cases tests write."""

from __future__ import annotations

from pathlib import Path

from tidegate.jobs.cases.case_check import open_runner
from tidegate.jobs.cases.case_report import CaseResult
from tidegate.jobs.spec.loader import parse_spec
from tidegate.jobs.spec.pipeline import PipelineSpec

SPEC = """\
apiVersion: tidegate/v1
name: orders
sources:
  orders:
    {source}
    schema: {{placed: timestamp, shop: string, amount: double}}
    event_time: placed
    lag: 10s
{more}
coalesce: {{idle_timeout: 30s}}
checkpoint: {{idle_interval: 10s}}
windows:
  per_minute:
    kind: tumbling
    size: 1m
    keys: [shop]
    aggregates: {{orders: count(*), amount: sum(amount)}}
"""
ROWS = """\
  - rows:
      orders:
        - {placed: 2026-01-01T12:00:05Z, shop: a, amount: 3}
        - {placed: 2026-01-01T12:01:20Z, shop: b, amount: 4}
  - rows:
      orders: |
        placed,shop,amount
        2026-01-01T12:00:10Z,a,5
        2026-01-01T12:01:40Z,b,
"""
ON_TIME = ROWS.replace("12:01:20", "12:00:18")
"""The first rows leave the frontier behind the second ones."""
EXPECTED = """\
expect:
  tables:
    per_minute:
      - {window_start: 2026-01-01T12:00:00Z, shop: a, orders: 2, amount: 8}
      - {window_start: 2026-01-01T12:00:00Z, shop: b, orders: 1, amount: 4}
      - {window_start: 2026-01-01T12:01:00Z, shop: b, orders: 1, amount: null}
    late: []
  counters: {read: 4, released: 4, orders: {read: 4}}
"""


JSON = "path: s3://shop/orders/\n    format: json"
RETURNS = """\
  returns: {path: returns/, format: json, partition_by: folder, lag: 10s,
            schema: {placed: timestamp, shop: string, amount: double}, event_time: placed}
"""


def make_spec(source: str = JSON, more: str = "") -> PipelineSpec:
    """Orders, with what says how they are read, and more sources."""
    return parse_spec(SPEC.format(source=source, more=more))


def write_case(folder: Path, *parts: str) -> Path:
    """A case of these steps, and of what follows them."""
    path = folder / "case.yaml"
    path.write_text("start: 2026-01-01T12:00:00Z\nsteps:\n" + "".join(parts))
    return path


def check_case(
    path: Path, spec: PipelineSpec | None = None, *, is_recorded: bool = False
) -> CaseResult:
    """Run a case as `tidegate test` does."""
    with open_runner(spec or make_spec()) as runner:
        return runner.check_case(path, is_recorded=is_recorded)
