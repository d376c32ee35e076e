"""``make presets``: the example of each preset on Spark, epoch by epoch against the oracle.

A real driver runs `docs/examples/presets/<preset>.yaml` over its input until the input ends. Then
each sealed epoch is decided and moved again from its manifest, by the decider and by the oracle in
plain Python, which carries its own state from epoch to epoch. The decision, the rows of every
table and the counters must be the same, and so must the verdict of each quality check over the
published tables and over the oracle's. At last `audit_exactness` reads the input again and finds
each row in one place. A second run of each example has an injected clock: its sources stall, fall
silent for longer than the idle timers, resume and end. Further cases (`spark_cases.CASES`) have what
no example has. Ends with `N of 6 exact on Spark`; the exit code is 1 below six, or if a case differs.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.conformance.spark_cases import CASES, EXAMPLES, play_silences
from tests.conformance.stepped_run import START, SteppedRun
from tests.e2e.drivers import Piped
from tests.expectations.evidence_reading import gather_evidence
from tests.manual_clock import ManualClock
from tests.oracle.mover import OracleMover
from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.open_store import ScratchStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.expectations.gx_runner import run_suites
from tidegate.jobs.driver.pipeline_run import make_dispatcher
from tidegate.jobs.engine.epoch_engine import EpochPorts
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult, SurveyedCut
from tidegate.jobs.engine.manifest_writer import DISPATCHER_KINDS
from tidegate.jobs.engine.replay import replay_epoch
from tidegate.jobs.sinks.exactness_audit import audit_exactness
from tidegate.jobs.sinks.output_tables import DriverTables, build_table_schema
from tidegate.jobs.sinks.published_tables import RowSelection, read_table, scan_table
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.spark.spark_session import open_session
from tidegate.jobs.spec.loader import parse_spec
from tidegate.jobs.spec.pipeline import (
    DEAD_LETTERS,
    EVENTS,
    LATE,
    PRESETS,
    PipelineSpec,
)

NAMES = sorted(PRESETS.keys() - {"tidegate"})


@dataclass
class ChainedOracle:
    """The oracle, which keeps what its last move has left for the next one."""

    oracle: OracleMover
    segments: list[FileRef] = field(default_factory=list)
    counters: EpochCounters | None = None
    files: list[tuple[int, str, FileRef]] = field(default_factory=list)
    """Epoch, table and file of what it has written."""

    def survey(self, cut: Cut, state: Mapping[str, Any], *_: Any) -> SurveyedCut:
        """The oracle's survey."""
        return self.oracle.survey(cut, state)

    def move(self, order: MoveOrder, surveyed: SurveyedCut) -> MoveResult:
        """The oracle's move, remembered."""
        moved = self.oracle.move(order, surveyed)
        self.segments, self.counters = list(moved.segments), moved.counters
        self.files += [(order.epoch, t, file) for t, refs in moved.files.items() for file in refs]
        return moved

    def read_table(self, name: str, since: int, schema: pa.Schema, store: Store) -> pa.Table:
        """Its rows of a table, of the epochs after `since`."""
        files = [file for epoch, t, file in self.files if t == name and epoch > since]
        tables = [pq.read_table(io.BytesIO(store.get(file.key).data)) for file in files]
        return pa.concat_tables(
            [schema.empty_table(), *(t.select(schema.names).cast(schema) for t in tables)]
        )

    def close(self) -> None:
        """Nothing to give back."""


def run_example(preset: str, folder: Path) -> Piped:
    """Run the example of a preset to the end of its input.

    Raises:
        AssertionError: the driver failed; the message has its log.
    """
    pipeline = Piped(folder, (EXAMPLES / f"{preset}.yaml").read_text())
    shutil.copytree(EXAMPLES / "input" / preset, pipeline.inbox / "inbox" / preset)
    assert pipeline.run() == 0, pipeline.log_text()
    return pipeline


def compare_with_oracle(
    pipeline: Piped | SteppedRun, spec: PipelineSpec, folder: Path
) -> list[str]:
    """Return what the epochs of a pipeline and an oracle with `spec` differ in, a line each."""
    sealed, log = pipeline.store(), pipeline.log()
    scratch = LocalStore(folder / "scratch")
    overlay = ScratchStore(InputView(sealed, spec, folder), scratch)
    mover = ChainedOracle(OracleMover(overlay, spec))
    parent: Manifest | None = None
    found = []
    head = log.head()
    for filled in log.epochs_between(head.timeline, 1, head.slot):
        epoch = filled.epoch
        # The rows that wait and the windows that are open are the oracle's own. What reducers and
        # buffers keep is that of the pipeline.
        kept = [s for s in parent.segments if s.kind.startswith(DISPATCHER_KINDS)] if parent else []
        before = parent and parent.model_copy(update={"segments": [*mover.segments, *kept]})
        dispatch = make_dispatcher(spec, overlay, SlotLog(overlay, spec.name), mover, parent)
        ports = EpochPorts((), mover, DriverTables(overlay).write, dispatch)
        result = replay_epoch(spec, epoch, before, ports, sealed, scratch)
        found += [f"epoch {epoch.slot}: decided {name}" for name in result.decided_differently]
        found += [
            f"epoch {epoch.slot}: {table} has {rows} rows, the oracle {others}, {differ} differ"
            for table, (rows, others, differ) in result.tables.items()
            if differ
        ]
        if mover.counters != epoch.epoch_counters:
            found.append(f"epoch {epoch.slot}: {epoch.epoch_counters} against {mover.counters}")
        parent = epoch
    return found + compare_verdicts(pipeline, spec, mover, scratch)


def compare_verdicts(
    pipeline: Piped | SteppedRun, spec: PipelineSpec, mover: ChainedOracle, scratch: Store
) -> list[str]:
    """Return the quality checks that judge the oracle's rows otherwise than the published ones."""
    store, moved = pipeline.store(), {EVENTS, LATE, DEAD_LETTERS, *spec.windows}

    def read_published(name: str, *, since: int = 0, whole: bool = False) -> pa.Table:
        return scan_table(spec, store, name, RowSelection(since=since, spliced=False))

    def read_of_oracle(name: str, *, since: int = 0, whole: bool = False) -> pa.Table:
        if name not in moved:  # the driver and the dispatcher write these
            return read_published(name, since=since)
        return mover.read_table(name, since, build_table_schema(spec, name), scratch)

    judged = []
    for read in (read_published, read_of_oracle):
        run = run_suites(gather_evidence(spec, store, read, clock=ManualClock(wall_ticks=START)))
        judged.append({check.id: (check.passed, check.value) for check in run.checks})
    published, own = judged
    return [
        f"check {name}: {result} against {own[name]}"
        for name, result in published.items()
        if str(result) != str(own[name])  # of two values that are not known, neither is equal
    ]


def audit_input(pipeline: Piped | SteppedRun, folder: Path) -> list[str]:
    """Return what the independent check of the input finds wrong, a line each."""
    spec, store = pipeline.spec, pipeline.store()
    folder.mkdir(parents=True)
    report = audit_exactness(
        spec,
        InputView(store, spec, folder),
        pipeline.log(),
        lambda name: read_table(spec, store, name, current_only=True),
    )
    return report.problems


def run_with_silences(preset: str, folder: Path, session: Any) -> SteppedRun:
    """Run the example of a preset while its sources stall and fall silent."""
    run = SteppedRun((EXAMPLES / f"{preset}.yaml").read_text(), folder, session)
    play_silences(run, preset)
    return run


def run_case(name: str, folder: Path, session: Any) -> SteppedRun:
    """Run one of the further cases."""
    text, play = CASES[name]
    run = SteppedRun(text, folder, session)
    play(run)
    return run


def report_differences(name: str, run: Callable[[Path], Piped | SteppedRun]) -> bool:
    """Run a pipeline, print what it differs in, and return whether it is exact."""
    with TemporaryDirectory(prefix="tidegate-presets-") as folder:
        pipeline = run(Path(folder) / "pipeline")
        differences = compare_with_oracle(pipeline, pipeline.spec, Path(folder) / "oracle")
        differences += audit_input(pipeline, Path(folder) / "audit")
        epochs = pipeline.log().head().slot
    sys.stdout.write(f"{name}: {epochs} epochs, {len(differences)} differences\n")
    sys.stdout.writelines(f"    {line}\n" for line in differences)
    sys.stdout.flush()
    return not differences


def main() -> int:
    """Run and compare each preset, twice, and the further cases."""
    exact = {name: report_differences(name, partial(run_example, name)) for name in NAMES}
    session = open_session(parse_spec((EXAMPLES / "flink.yaml").read_text()))
    for name in NAMES:
        run = partial(run_with_silences, name, session=session)
        exact[name] &= report_differences(f"{name}, with silences", run)
    cases = [report_differences(name, partial(run_case, name, session=session)) for name in CASES]
    session.stop()
    sys.stdout.write(f"{sum(cases)} of {len(cases)} further cases exact on Spark\n")
    sys.stdout.write(f"{sum(exact.values())} of {len(NAMES)} exact on Spark\n")
    return 0 if all(exact.values()) and all(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
