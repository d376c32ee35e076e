"""One quality run, from tables to the result in the bucket."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from tidegate.checkpoints.clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.layout import BucketLayout
from tidegate.checkpoints.store import Store
from tidegate.expectations import docs
from tidegate.expectations.evidence import TableReader, gather_evidence
from tidegate.expectations.runner import CheckResult, load_great_expectations, run_suites
from tidegate.expectations.summaries import LATE_COLUMNS, event_columns
from tidegate.jobs.spec.pipeline import EVENTS, LATE, PipelineSpec

__all__ = ["SCHEMA_VERSION", "check_quality"]

SCHEMA_VERSION = 1
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def check_quality(
    spec: PipelineSpec, store: Store, *, read: TableReader | None = None, clock: Clock = SYSTEM_CLOCK
) -> dict[str, Any]:
    """Run every suite, put result and Data Docs into the store, and return the result.

    The result's ``verdict`` is ``pass``, ``warn`` or ``fail``; ``checkpoint`` is the newest one that was looked at, so
    that ``recover_to: latest_healthy`` can tell which checkpoints were found healthy; ``key`` and ``docs`` are store keys.

    Raises:
        ConfigurationError: a suite is wrong.
        TransientError: the store or the catalog cannot be reached now.
    """
    read = read or _make_table_reader(spec, store)
    load_great_expectations()  # like pyiceberg's import above a part of the process's start, not of the check
    begun = time.monotonic()
    evidence = gather_evidence(spec, store, read, clock=clock)
    run = run_suites(evidence)
    at = _UNIX_EPOCH + timedelta(microseconds=evidence.now)
    name, quality = at.strftime("%Y%m%dT%H%M%S.%fZ"), BucketLayout(spec.name).quality_prefix
    head = evidence.head
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "quality",
        "id": name,
        "key": f"{quality}results/{name}.json",
        "docs": f"{quality}docs/{name}/index.html",
        "pipeline": spec.name,
        "at": at.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "checkpoint": str(head.id) if head else None,
        "timeline": head.timeline if head else None,
        "epoch": head.slot if head else None,
        "verdict": run.verdict,
        "failed": [_dump_check(c) for c in run.failed_checks],
        "checks": [_dump_check(c) for c in run.checks],
        "seconds": round(time.monotonic() - begun, 3),
    }
    docs.publish_data_docs(store, result, run)
    return result


def _dump_check(check: CheckResult) -> dict[str, Any]:
    return asdict(check) | {"offenders": list(check.offenders), "page": check.page_name}


def _make_table_reader(spec: PipelineSpec, store: Store) -> TableReader:
    from tidegate.jobs.sinks.tables import read_table  # pyiceberg takes a second to import

    # The two tables that may be large are read without the user's columns.
    narrow = {EVENTS: event_columns(spec), LATE: LATE_COLUMNS}

    def read_run_rows(name: str, *, since: int = 0) -> pa.Table:
        # What was merged in later is not the run's doing: the checks judge the run.
        return read_table(spec, store, name, since=since, columns=narrow.get(name), spliced=False)

    return read_run_rows
