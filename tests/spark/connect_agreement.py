"""Cases for a classic session and for one of Spark Connect, which takes a process of its own."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.spark.agreement import SECOND, Pair, Row, rows_of, spec_of
from tests.spark.topic_epochs import run_epoch
from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.rows import cut_division
from tidegate.jobs.spark import frame_tasks, python_tasks, task_events
from tidegate.jobs.spark.spark_session import (
    SPARK_ERRORS,
    extract_cause,
    find_carried_error,
    open_session,
)
from tidegate.jobs.spark.worker_versions import describe_versions
from tidegate.jobs.spec.pipeline import PipelineSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WINDOWS: dict[str, Any] = {
    "w": {
        "kind": "tumbling",
        "size": "10s",
        "keys": ["k"],
        "on_late": "side_output",
        "aggregates": {"n": "count(*)", "s": "sum(v)", "mean": "avg(v)", "top": "max(n)"},
    },
    "visits": {"kind": "session", "gap": "4s", "keys": ["k"], "aggregates": {"n": "count(*)"}},
}
TABLES = ("events", "late", "dead_letters", "built", *WINDOWS)
FORMS = ("pass_through", "one_task", "shuffle", "evaluated")
EVALUATED = {"a": {"where": "upper(k) in ('X', 'Y')"}, "b": {}}
"""Sources of which Spark SQL evaluates the rows, by two plans."""


def run_form(session: SparkSession, folder: Path, form: str, **more: Any) -> Pair:
    """Feed a pipeline with windows and events, whose late and dead rows are kept."""
    mode = "pass_through" if form == "pass_through" else "ordered"
    release: dict[str, Any] = {"mode": mode, "on_late": "side_output"}
    if mode == "ordered":
        release["glom"] = {"dt": "2s", "max_rows": 3}
    sources = EVALUATED if form == "evaluated" else None
    spec = spec_of(sources, windows=WINDOWS, release=release, **more)
    pair, draw = Pair(spec, session, folder), random.Random(form)
    for epoch in range(5):
        for source in "ab":
            rows: list[Any] = rows_of(draw, 20 * epoch)
            for row in rows:
                row["t"] = None if draw.random() < 0.05 else row["t"]
            # The last row is late in most epochs, and the one before it ends windows.
            ends = [{"t": time * SECOND, "k": "x", "n": 1, "v": 0.1} for time in (20 * epoch, 1)]
            pair.put(source, rows + ends)
        pair.run(epoch * SECOND)
    pair.run(9 * SECOND, done=True)
    return pair


def read_tables(pair: Pair) -> dict[str, list[Row]]:
    """All rows of all tables."""
    return {name: pair.table(name) for name in TABLES}


def count_late_files(pair: Pair) -> int:
    """Files of late rows in the store, also those of tasks that have run again."""
    folder = pair.store.local_path("spark")
    assert folder is not None
    return len(list(folder.rglob("late/*/part-*.parquet")))


@cache
def join_server(address: str) -> SparkSession:
    """The session of this process."""
    return open_session(spec_of(spark={"master": address}))


def run_far(address: str, folder: Path, form: str) -> tuple[dict[str, list[Row]], int]:
    """The tables of a pipeline on a Connect server, and its files of late rows.

    The caller gives the process.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cut_division, "UNIT_BYTES", 1)
        if form == "shuffle":
            patched.setattr(task_events, "RANGE_BYTES", 1000)
        pair = run_form(join_server(address), folder, form, spark={"master": address})
        found = read_tables(pair), count_late_files(pair)
        pair.spark.close()
    return found


def run_far_topic(spec: PipelineSpec, folder: Path, cut: Cut) -> tuple[Any, EpochCounters]:
    """Survey and counters of an epoch over a topic, on a Connect server."""
    session = join_server(spec.spark.master)
    members, moved = run_epoch(spec, session, folder, cut)
    return members, moved.counters


def find_refused_versions(address: str) -> list[str]:
    """Codes of the errors of a start, and of a later job, for a driver with another DuckDB."""
    session, codes = join_server(address), []
    other = json.loads(describe_versions()) | {"duckdb": "0.0.1"}
    with patch.object(frame_tasks, "describe_versions", lambda: json.dumps(other)):
        for run in (
            lambda: frame_tasks.start_workers(session),
            lambda: frame_tasks.run_small_job(session, python_tasks.describe_units, [1]),
        ):
            try:
                run()
            except SPARK_ERRORS as error:
                carried = find_carried_error(error)
                codes.append("" if carried is None else carried.code)
    return codes


def explain_refusal(
    address: str,
    libraries: list[str],
    sample: python_tasks.StoreSample | None,
    spec: PipelineSpec | None = None,
) -> str | None:
    """Why workers of a server cannot be used; None if they can."""
    try:
        frame_tasks.start_workers(join_server(address), None, libraries, sample, spec)
    except SPARK_ERRORS as error:
        return extract_cause(error)
    return None
