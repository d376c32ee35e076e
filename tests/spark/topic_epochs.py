"""Epochs over topics, and their rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from tests.spark.agreement import SECOND
from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout, CheckpointId
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult
from tidegate.jobs.eventtime.decider import create_initial_state, decide
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.spark.mover import SparkMover
from tidegate.jobs.spec.pipeline import PipelineSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run_epoch(
    spec: PipelineSpec, session: SparkSession, folder: Path, cut: Cut
) -> tuple[Any, MoveResult]:
    """Survey and counters of a first epoch over a cut."""
    store = InputView(LocalStore(folder / "store"), spec, folder / "view")
    found = SparkMover(store, spec, folder / "work", session=session)
    folders = AttemptFolders(BucketLayout("p"), CheckpointId(0, 1, "abcdef"))
    state = create_initial_state(spec)
    try:
        surveyed = found.survey(cut, state, folders)
        decision = decide(spec, state, replace(surveyed.survey, now=SECOND))
        moved = found.move(MoveOrder(cut, decision, (), folders, 0), surveyed)
    finally:
        found.close()
    return surveyed.survey.members, moved


def read_events(moved: MoveResult, folder: Path) -> list[dict[str, Any]]:
    """The rows of the events table in the order of their positions."""
    return read_rows(moved, folder, "events", "position")


def read_rows(moved: MoveResult, folder: Path, table: str, order: str) -> list[dict[str, Any]]:
    """The rows of a table, by a column."""
    refs = moved.files[table]
    rows = [
        row
        for ref in refs
        for row in pq.read_table(folder / "store" / ref.key, partitioning=None).to_pylist()
    ]
    return sorted(rows, key=lambda row: int(row[order]))
