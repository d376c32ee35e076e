"""Runs a test case: the production engine and kernel, in this process, with the clock of the case.

The sources of the spec become folders of objects in a store of the case. Text stays text in its
format; all other rows, also those of tables and of Avro and Protobuf topics, become Parquet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from structlog.testing import capture_logs

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.row_counts import ROW_EQUATION, RowCounts
from tidegate.errors import PoisonError, TidegateError
from tidegate.jobs.engine.arrow_tables import read_parquet_object
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rules.native_support import (
    explain_spark_aggregates,
    explain_unproven_expressions,
)
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.spark.local_session import LocalContext, LocalRows, LocalSession
from tidegate.jobs.spec.operations import SparkSpec
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.source_options import DiscoveryOptions

from .case_file import Case, Step
from .case_rows import RowsInput, encode_rows, has_text_rows
from .errors import CASE_NEEDS_SPARK
from .stepped_pipeline import SteppedPipeline

_MOST_EPOCHS_OF_SILENCE = 30
_EPOCH_SECONDS = 1.0  # between the rows of two steps


@dataclass(frozen=True)
class CaseOutcome:
    """What a case has led to.

    Attributes:
        tables: each output table of the pipeline.
        counters: name, or source and name with a dot -> rows.
        error: what ended the run; None if nothing did.
    """

    tables: Mapping[str, pa.Table]
    counters: Mapping[str, int]
    error: TidegateError | None


def replace_sources(spec: PipelineSpec) -> PipelineSpec:
    """Return the spec with sources in the store of a case, and a Spark of this machine."""
    sources = {name: _replace_source(name, one) for name, one in spec.sources.items()}
    spark = spec.spark.model_copy(update={"master": SparkSpec().master})
    return spec.model_copy(update={"sources": sources, "spark": spark})


def _replace_source(name: str, source: SourceSpec) -> SourceSpec:
    text = source.format if source.format == "csv" else "json"
    return source.model_copy(
        update={
            "kind": "objects",
            "kafka": None,
            "table": None,
            "landing": None,
            "path": f"input/{name}/",
            "format": text if has_text_rows(source) else "parquet",
            "partition_by": source.partition_by if source.kafka is None else "folder",
            "discovery": DiscoveryOptions(),
            "bounded": True,
        }
    )


def make_local_session(spec: PipelineSpec) -> Any:
    """Return what runs the kernel in this process.

    Raises:
        ConfigurationError: the pipeline needs Spark.
    """
    reason = explain_spark_aggregates(spec) or explain_unproven_expressions(spec)
    if reason is not None:
        raise CASE_NEEDS_SPARK(pipeline=spec.name, reason=reason)
    return LocalSession()


def run_case(spec: PipelineSpec, case: Case, session: Any) -> CaseOutcome:
    """Run a case.

    Args:
        spec: as `replace_sources` returns it.
        case: what happens.
        session: a Spark session, or that of `make_local_session`.

    Raises:
        ConfigurationError: an epoch needs Spark SQL, and the session has none.
    """
    # In memory, if this host has such a folder: a case survives nothing.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a new folder
    # The log of a driver would only stand between the results.
    with TemporaryDirectory(prefix="tidegate-case-", dir=memory) as folder, capture_logs():
        pipeline = SteppedPipeline(spec, Path(folder), session, case.start)
        error = None
        try:
            _CaseRun(pipeline).run_steps(case)
        except PoisonError as poison:
            error = poison
        except AttributeError as missing:
            if not isinstance(missing.obj, LocalSession | LocalContext | LocalRows):
                raise
            reason = "an epoch is computed by Spark SQL, because of what its objects hold"
            raise CASE_NEEDS_SPARK(pipeline=spec.name, reason=reason) from missing
        return _read_outcome(pipeline, error)


class _CaseRun:
    """The steps of one case."""

    def __init__(self, pipeline: SteppedPipeline) -> None:
        self._pipeline = pipeline
        self._objects = 0

    def run_steps(self, case: Case) -> None:
        with ExitStack() as driver:
            driver.enter_context(self._pipeline.open_engine())
            for step in case.steps:
                if step.restart:
                    driver.close()
                    driver.enter_context(self._pipeline.open_engine())
                else:
                    self._run_step(step)

    def _run_step(self, step: Step) -> None:
        if step.wait:
            self._wait(step.wait)
            return
        for member, given in step.rows.items():
            self._put(member, given)
        for source in step.ends:
            self._pipeline.end(source)
        self._run_epochs(step.ctis)

    def _put(self, member: Member, given: RowsInput) -> None:
        source = self._pipeline.spec.sources[member.source]
        self._objects += 1
        if given.file is not None:
            ending, data = given.file.name.partition(".")[2], given.file.read_bytes()
        else:
            ending, data = encode_rows(source, given.rows)
        folder = f"{member.partition}/" if source.partition_by == "folder" else ""
        self._pipeline.put(member.source, f"{folder}{self._objects:06}.{ending}", data)

    def _run_epochs(self, ctis: Mapping[str, int]) -> None:
        """Run epochs until everything that has arrived is read, or waits at a barrier."""
        report = self._pipeline.step(_EPOCH_SECONDS, ctis)
        quiet = 0
        while report.pending and quiet < 2:
            report = self._pipeline.step(0)
            quiet = 0 if report.rows else quiet + 1

    def _wait(self, ticks: int) -> None:
        """Run epochs without new rows, as far apart as a driver's."""
        interval = self._pipeline.spec.checkpoint.idle_interval
        epochs = min(max(1, ticks // max(interval, 1)), _MOST_EPOCHS_OF_SILENCE)
        for _ in range(epochs):
            self._pipeline.step(ticks / 1e6 / epochs)


def _read_outcome(pipeline: SteppedPipeline, error: TidegateError | None) -> CaseOutcome:
    log, spec = pipeline.slot_log, pipeline.spec
    head = log.head()
    epochs = [one.epoch for one in log.epochs_between(head.timeline, 1, head.slot)]
    tables = {name: _read_table(pipeline, epochs, name) for name in spec.table_names}
    return CaseOutcome(tables, _read_counters(epochs[-1]) if epochs else {}, error)


def _read_table(pipeline: SteppedPipeline, epochs: list[Manifest], name: str) -> pa.Table:
    files = [file for epoch in epochs for file in epoch.files.get(name, ())]
    found = [read_parquet_object(pipeline.local_store, file.key) for file in files]
    if not found:
        return build_table_schema(pipeline.spec, name).empty_table()
    return pa.concat_tables(found, promote_options="permissive")


def _read_counters(newest: Manifest) -> dict[str, int]:
    counters = newest.counters
    found = {**RowCounts.of_sources(counters.per_source).counts}
    found |= {name: getattr(counters, name) for name in (*ROW_EQUATION, "retained")}
    found["dropped"] = sum(counters.dropped.values())
    for source, counts in counters.per_source.items():
        own = RowCounts.of_source(counts).counts
        found |= {f"{source}.{name}": rows for name, rows in own.items()}
    return found
