"""``make presets``: the example of each preset on Spark, epoch by epoch against the oracle.

A real driver runs `docs/examples/presets/<preset>.yaml` over its input until the input ends. Then
each sealed epoch is decided and moved again from its manifest, by the decider and by the oracle in
plain Python, which carries its own state from epoch to epoch. The decision, the rows of every
table and the counters must be the same. At last `audit_exactness` reads the input again and finds
each row in one place. Ends with `N of 6 exact on Spark`; the exit code is 1 below six.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.e2e.drivers import Piped
from tests.oracle.mover import OracleMover
from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.scratch_store import ScratchStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.driver.pipeline_run import make_dispatcher
from tidegate.jobs.engine.epoch_engine import EpochPorts
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult, SurveyedCut
from tidegate.jobs.engine.replay import replay_epoch
from tidegate.jobs.sinks.exactness_audit import audit_exactness
from tidegate.jobs.sinks.output_tables import DriverTables
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.presets import PRESETS

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "presets"
NAMES = sorted(PRESETS.keys() - {"tidegate"})


@dataclass
class ChainedOracle:
    """The oracle, which keeps what its last move has left for the next one."""

    oracle: OracleMover
    segments: list[FileRef] = field(default_factory=list)
    counters: EpochCounters | None = None

    def survey(self, cut: Cut, state: Mapping[str, Any]) -> SurveyedCut:
        """The oracle's survey."""
        return self.oracle.survey(cut, state)

    def move(self, order: MoveOrder, surveyed: SurveyedCut) -> MoveResult:
        """The oracle's move, remembered."""
        moved = self.oracle.move(order, surveyed)
        self.segments, self.counters = list(moved.segments), moved.counters
        return moved

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


def compare_with_oracle(pipeline: Piped, spec: PipelineSpec, folder: Path) -> list[str]:
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
        # The rows that wait and the windows that are open are the oracle's own.
        before = parent and parent.model_copy(update={"segments": mover.segments})
        dispatch = make_dispatcher(spec, overlay, SlotLog(overlay, spec.name), mover, parent)
        ports = EpochPorts((), mover, DriverTables(overlay).write, dispatch)
        result = replay_epoch(spec, epoch, before, ports, overlay, scratch)
        found += [f"epoch {epoch.slot}: decided {name}" for name in result.decided_differently]
        found += [
            f"epoch {epoch.slot}: {table} has {rows} rows, the oracle {others}, {differ} differ"
            for table, (rows, others, differ) in result.tables.items()
            if differ
        ]
        if mover.counters != epoch.epoch_counters:
            found.append(f"epoch {epoch.slot}: {epoch.epoch_counters} against {mover.counters}")
        parent = epoch
    return found


def audit_input(pipeline: Piped, folder: Path) -> list[str]:
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


def main() -> int:
    """Run and compare each preset."""
    exact = 0
    for preset in NAMES:
        with TemporaryDirectory(prefix=f"tidegate-{preset}-") as folder:
            pipeline = run_example(preset, Path(folder) / "pipeline")
            differences = compare_with_oracle(pipeline, pipeline.spec, Path(folder) / "oracle")
            differences += audit_input(pipeline, Path(folder) / "audit")
            epochs = pipeline.log().head().slot
        sys.stdout.write(f"{preset}: {epochs} epochs, {len(differences)} differences\n")
        sys.stdout.writelines(f"    {line}\n" for line in differences)
        sys.stdout.flush()
        exact += not differences
    sys.stdout.write(f"{exact} of {len(NAMES)} exact on Spark\n")
    return 0 if exact == len(NAMES) else 1


if __name__ == "__main__":
    sys.exit(main())
