"""One run of the DAG that restores, with a person who asks and one who answers."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from tidegate.jobs.spec.operations import SupervisionSpec
from tidegate.operators.recover_and_pin import (
    RecoverOperator,
    ReportRestoreOperator,
)
from tidegate.operators.splice_operators import ApproveRestoreOperator


class Asking:
    """One run of `p.recover`: its tasks' results, and who triggered it."""

    def __init__(self, run_id: str = "r", who: str | None = "ann", reason: str = "a test") -> None:
        self.run_id, self.who, self.reason = run_id, who, reason
        self.results: dict[str, Any] = {}

    def context(self) -> dict[str, Any]:
        def pull(task_ids: str) -> Any:
            return self.results.get(task_ids)

        task = SimpleNamespace(xcom_pull=pull, get_dr_count=lambda **_: 1)
        return {
            "run_id": self.run_id,
            "dag_run": SimpleNamespace(triggering_user_name=self.who),
            "ti": task,
        }

    def report(self, checkpoint: str, dry_run: bool = False) -> str:
        made = ReportRestoreOperator(
            task_id="report",
            pipeline="p",
            checkpoint=checkpoint,
            reason=self.reason,
            dry_run_only=str(dry_run),
        )
        self.results["report"] = made.execute(self.context())
        return self.question()

    def question(self) -> str:
        return ApproveRestoreOperator(task_id="approve", pipeline="p").build_question(
            self.context()
        )

    def answer(self, chosen: str, by: str, user_id: str | None = None) -> None:
        asked = ApproveRestoreOperator(task_id="approve", pipeline="p")
        event = {
            "chosen_options": [chosen],
            "params_input": {},
            "responded_at": datetime.now(UTC),
            "responded_by_user": {"id": user_id or by, "name": by},
        }
        self.results["approve"] = asked.execute_complete(self.context(), event)

    def recover(self, **terms: Any) -> dict[str, Any]:
        made = RecoverOperator(
            task_id="recover",
            pipeline="p",
            spec="p.yaml",
            checkpoint="latest",  # the approved one counts, whatever the form says by now
            reason="a test",
            dry_run_only="False",
            supervision=SupervisionSpec(approval=True, **terms),
        )
        return made.execute(self.context())
