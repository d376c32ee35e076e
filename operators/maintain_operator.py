"""Keeping the bucket in order: index, retention, scrub, logs.

Safe beside a live driver, and each part beside the others.

    index      the catalog's pages are filled up, so that nobody who looks has to wait for it
    retention  small files of the tables are merged, checkpoints beyond what the spec keeps are
    retired, files that nothing needs
               are deleted (a process of its own: it asks the tables, whose libraries Airflow's
               workers need not load)
    scrub      the newest checkpoint, the pinned ones, and each time another seventh of the rest:
    presence, size, checksums logs       all but the newest drivers' logs go

A damaged checkpoint is condemned, so that nobody restores it, and turns the run red.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from airflow.sdk import BaseOperator

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.driver_reports import delete_old_logs
from tidegate.checkpoints.slot_index import SlotSummary
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.verify import (
    CheckpointVerdict,
    Verification,
    condemn_if_damaged,
    scrub_checkpoints,
)
from tidegate.errors import PoisonError, TransientError
from tidegate.operators.child_processes import classify_exit_code, rebuild_error
from tidegate.operators.store_access import StoreAccess, build_child_environment

SCRUB_SHARES: Final = 7  # runs until every checkpoint was read once
_RETENTION_TIMEOUT: Final = 3600.0  # seconds
_CLI_COMMAND: Final = (
    sys.executable,
    "-P",
    "-c",
    "from tidegate.jobs.cli.main import main; main()",
)


class MaintainOperator(BaseOperator):
    """Runs the four parts; what each did is the task's result.

    Args:
        pipeline: name of the pipeline.
        spec: path of its YAML file.
        keep_hours: checkpoints younger than this stay, however many there are.
        conn_id: Airflow connection of the store; None for the environment.
    """

    ui_color = "#dbe7d3"

    def __init__(
        self,
        *,
        pipeline: str,
        spec: str,
        keep_hours: float = 24.0,
        conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline, self.spec, self.keep_hours, self.conn_id = (
            pipeline,
            spec,
            keep_hours,
            conn_id,
        )

    def execute(self, context: Any) -> dict[str, Any]:
        """Run them.

        Raises:
            PoisonError: checkpoints are damaged; all else was done.
            TidegateError: the retention could not run.
        """
        access = StoreAccess.resolve(self.conn_id)
        store = access.open()
        catalog = CheckpointCatalog(SlotLog(store, self.pipeline))
        if catalog.log.head().record is None:
            self.log.info("nothing was sealed yet")
            return {"pipeline": self.pipeline}
        catalog.index.refresh()
        retired = self._run_retention(access)
        self.log.info(
            "retired %s checkpoints, deleted %s files",
            len(retired["retired"]),
            len(retired["deleted"]),
        )
        before, after = (
            sum(table[when] for table in retired["compacted"].values())
            for when in ("before", "after")
        )
        self.log.info("the tables' %s data files became %s", before, after)
        results = list(self._scrub_checkpoints(catalog))
        forgotten = delete_old_logs(store, self.pipeline)
        damaged = [r for r in results if r.verdict is CheckpointVerdict.DAMAGED]
        if damaged:
            raise self._build_damage_error(damaged)
        return {
            "pipeline": self.pipeline,
            "retired": len(retired["retired"]),
            "deleted": len(retired["deleted"]),
            "deleted_bytes": retired["deleted_bytes"],
            "data_files_before": before,
            "data_files_after": after,
            "scrubbed": len(results),
            "logs_forgotten": len(forgotten),
        }

    def _run_retention(self, access: StoreAccess) -> Mapping[str, Any]:
        options = ["--store", access.url, "--keep-hours", str(self.keep_hours), "--json"]
        done = subprocess.run(
            [*_CLI_COMMAND, "gc", self.spec, *options],
            env=build_child_environment(access),
            capture_output=True,
            text=True,
            timeout=_RETENTION_TIMEOUT,
            check=False,
        )
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout)["data"]
            return found
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        kind = classify_exit_code(done.returncode)
        if kind is None:
            raise TransientError(
                f"the retention ended with code {done.returncode}: {last}", code="maintain.crashed"
            )
        raise rebuild_error(
            {
                "class": kind.value,
                "code": "maintain.not_run",
                "message": last,
                "pipeline": self.pipeline,
            }
        )

    def _scrub_checkpoints(self, catalog: CheckpointCatalog) -> Iterator[Verification]:
        chosen = select_for_scrub(catalog.list_checkpoints(), datetime.now(UTC).toordinal())
        for result in scrub_checkpoints(catalog.log, chosen):
            condemn_if_damaged(catalog.log, result)
            if result.verdict is not CheckpointVerdict.HEALTHY:
                self.log.warning(
                    "%s is %s: %s",
                    result.checkpoint,
                    result.verdict.value,
                    _format_findings(result),
                )
            yield result

    def _build_damage_error(self, damaged: list[Verification]) -> PoisonError:
        names = "; ".join(f"{result.checkpoint} ({_format_findings(result)})" for result in damaged)
        return PoisonError(
            f"{len(damaged)} checkpoint(s) of {self.pipeline} are damaged: {names}",
            code="maintain.damaged",
            pipeline=self.pipeline,
            kept="all others; the damaged ones are condemned, so that nobody restores them",
            advice=(
                "find out what happened to the objects; see: tidegate checkpoints verify"
                f" {self.pipeline} --all"
            ),
        )


def select_for_scrub(rows: list[SlotSummary], day: int) -> list[CheckpointId]:
    """The newest, the pinned ones, and the share of this day of all others.

    What is condemned or retired is not read again.
    """
    whole = [row for row in rows if row.is_restorable and row.id]
    wanted = [
        row
        for number, row in enumerate(whole)
        if number == 0 or row.pins or row.slot % SCRUB_SHARES == day % SCRUB_SHARES
    ]
    return [CheckpointId.parse(str(row.id)) for row in wanted]


def _format_findings(result: Verification) -> str:
    return "; ".join(f"{f.problem.value}: {f.key}" for f in result.findings[:3])
