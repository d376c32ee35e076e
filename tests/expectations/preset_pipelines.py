"""A pipeline on the real engine whose epochs a test writes down, with its quality checks."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tests.engine.harness import Bench, PlainSteps, row, spec_of
from tests.oracle.memory_source import MemorySource

from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.expectations.quality_run import check_quality
from tidegate.jobs.engine.epoch_engine import EpochReport
from tidegate.jobs.engine.interfaces import DeadObject, Slice
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sinks.output_tables import build_checkpoint_rows, build_table_schema
from tidegate.jobs.spec.pipeline import CHECKPOINTS

RECENT = 2
"""Epochs that the checks of these pipelines call recent."""
BREAKING_VALUES = {"quarantine": 101, "drop": 102, "warn": 103}
"""Severity of a row rule -> the value of ``v`` that breaks it."""
FILTERED_VALUE = 104
RULES = {
    severity: {"predicate": f"v <> {value}", "severity": severity}
    for severity, value in BREAKING_VALUES.items()
}


class ObjectSourceDouble(MemorySource):
    """A source of rows that can also bring an object that is set aside as a whole."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.set_aside: list[DeadObject] = []

    def plan(self, member: Member, *args: Any, **options: Any) -> Slice:
        """The next slice, with the objects that are set aside."""
        part = super().plan(member, *args, **options)
        dead, self.set_aside = tuple(self.set_aside), []
        return replace(part, dead=dead)


class Pipeline:
    """A pipeline whose epochs follow each other by three seconds and ten seconds of event time."""

    def __init__(self, preset: str, options: dict[str, Any] | None = None, **quality: Any) -> None:
        plain = spec_of().model_dump(by_alias=True, include={"sources"})["sources"]["a"]
        names = ("path", "schema", "event_time", "lag", "barriers")
        source = {name: plain[name] for name in names}
        source["barriers"]["types"] = ["cut", "end"]
        source |= {"rules": RULES, "where": f"v <> {FILTERED_VALUE}"}
        quality = {"recent": RECENT, **quality}
        fields: dict[str, Any] = {"preset": preset, "quality": quality, **(options or {})}
        self.bench = Bench(spec_of(sources={"a": source, "b": source}, **fields))
        self.bench.sources = {name: ObjectSourceDouble(name) for name in self.bench.sources}
        self.engine = self.bench.engine(steps=PlainSteps(self.bench.clock))
        self.reports: list[EpochReport] = []
        self.time = 0

    def run_epoch(
        self, *late: dict[str, Any], markers: dict[str, dict[str, Any]] | None = None
    ) -> int:
        """Seal an epoch in which every source brings a row in time behind `late` ones."""
        self.bench.clock.advance(3)
        self.time += 10
        for name, source in self.bench.sources.items():
            source.append(*late, row(self.time))
            if markers and name in markers:
                source.append(markers[name])
        report = self.engine.run_epoch()
        assert report.manifest is not None
        self.reports.append(report)
        return report.manifest.slot

    def check(self) -> dict[str, Any]:
        """Run the quality checks over everything that is sealed."""
        return check_quality(
            self.bench.spec, self.bench.store, read=self.read_table, clock=self.bench.clock
        )

    def latest_healthy(self) -> int:
        """The slot at which `recover_to: latest_healthy` goes on."""
        return CheckpointCatalog(self.bench.log).resolve("latest_healthy").slot

    def read_table(self, name: str, *, since: int = 0, whole: bool = False) -> pa.Table:
        epochs = [epoch for epoch in self.bench.epochs() if epoch.slot > since]
        if name == CHECKPOINTS:
            return build_checkpoint_rows(epochs)
        schema = build_table_schema(self.bench.spec, name)
        files = [file for epoch in epochs for file in epoch.files.get(name, [])]
        tables = [pq.read_table(io.BytesIO(self.bench.store.get(f.key).data)) for f in files]
        return pa.concat_tables(
            [schema.empty_table(), *(t.select(schema.names).cast(schema) for t in tables)]
        )
