"""Keep the bucket in order: index, retention, scrub, logs.

Safe while a driver runs, and each part while another one runs.

    index      completes the catalog's pages, so that people who look at it need not wait for it
    retention  merges small files of the tables, retires checkpoints beyond what the spec keeps,
               and deletes files that nothing needs; a child process, because it asks the tables,
               whose libraries Airflow's workers need not load
    scrub      reads the newest checkpoint, the pinned ones, and each time another seventh of the
               rest: presence, size, checksums
    logs       deletes all but the newest drivers' logs

A damaged checkpoint is condemned, so that it cannot be restored, and fails the run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.driver_reports import delete_old_logs
from tidegate.checkpoints.slot_index import SlotSummary
from tidegate.checkpoints.verify import (
    CheckpointVerdict,
    Verification,
    condemn_if_damaged,
    scrub_checkpoints,
)
from tidegate.operators.child_processes import build_child_error, run_child
from tidegate.operators.errors import MAINTAIN_CRASHED, MAINTAIN_DAMAGED
from tidegate.operators.pipeline_operator import PipelineOperator

SCRUB_SHARES: Final = 7  # runs until every checkpoint was read once
# -P: without it Python would look for packages in the worker's folder first.
_CLI_COMMAND: Final = (
    sys.executable,
    "-P",
    "-c",
    "from tidegate.jobs.cli.main import main; main()",
)


class MaintainOperator(PipelineOperator):
    """Runs the four parts; what each did is the task's result.

    Args:
        keep_hours: checkpoints younger than this stay, however many there are.
    """

    ui_color = "#dbe7d3"

    def __init__(self, *, keep_hours: float = 24.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.keep_hours = keep_hours

    def execute(self, context: Any) -> dict[str, Any]:
        """Run them.

        Raises:
            PoisonError: checkpoints are damaged; all else was done.
            TidegateError: the retention could not run.
        """
        catalog = CheckpointCatalog(self.open_log())
        if catalog.log.head().record is None:
            self.log.info("nothing was sealed yet")
            return {"pipeline": self.pipeline}
        catalog.index.refresh()
        retired = self._run_retention()
        results = list(self._scrub_checkpoints(catalog))
        forgotten = delete_old_logs(catalog.log.store, self.pipeline)
        damaged = [r for r in results if r.verdict is CheckpointVerdict.DAMAGED]
        if damaged:
            names = "; ".join(f"{r.checkpoint} ({_format_findings(r)})" for r in damaged)
            raise MAINTAIN_DAMAGED(pipeline=self.pipeline, count=len(damaged), names=names)
        return {
            "pipeline": self.pipeline,
            **retired,
            "scrubbed": len(results),
            "logs_forgotten": len(forgotten),
        }

    def _run_retention(self) -> dict[str, Any]:
        access = self.resolve_access()
        options = ["--store", access.url, "--keep-hours", str(self.keep_hours), "--json"]
        child = run_child(access, [*_CLI_COMMAND, "gc", self.spec, *options])
        if child.returncode != 0:
            raise build_child_error(child, MAINTAIN_CRASHED, self.pipeline)
        data = json.loads(child.stdout)["data"]
        retired, deleted = len(data["retired"]), len(data["deleted"])
        before, after = (
            sum(table[when] for table in data["compacted"].values()) for when in ("before", "after")
        )
        self.log.info("retired %s checkpoints, deleted %s files", retired, deleted)
        self.log.info("the tables' %s data files became %s", before, after)
        return {
            "retired": retired,
            "deleted": deleted,
            "deleted_bytes": data["deleted_bytes"],
            "data_files_before": before,
            "data_files_after": after,
        }

    def _scrub_checkpoints(self, catalog: CheckpointCatalog) -> Iterator[Verification]:
        chosen = select_for_scrub(catalog.list_checkpoints(), datetime.now(UTC).toordinal())
        for result in scrub_checkpoints(catalog.log, chosen):
            condemn_if_damaged(catalog.log, result)
            if result.verdict is not CheckpointVerdict.HEALTHY:
                findings = _format_findings(result)
                self.log.warning("%s is %s: %s", result.checkpoint, result.verdict.value, findings)
            yield result


def select_for_scrub(rows: list[SlotSummary], day: int) -> list[CheckpointId]:
    """Return the newest, the pinned, and this day's share of all other checkpoints.

    Condemned and retired ones are not read again.
    """
    restorable = [row for row in rows if row.is_restorable and row.id]
    return [
        CheckpointId.parse(str(row.id))
        for number, row in enumerate(restorable)
        if number == 0 or row.pins or row.slot % SCRUB_SHARES == day % SCRUB_SHARES
    ]


def _format_findings(result: Verification) -> str:
    return "; ".join(f"{f.problem.value}: {f.key}" for f in result.findings[:3])
