"""A client of Airflow's API that can do what only tests do."""

from __future__ import annotations

import json
from typing import Any

from tidegate.infra.airflow_processes import (
    AirflowApi,
    build_run_path,
    quote_segment,
    retry_server_errors,
)
from tidegate.infra.local_stack import Stack


class ApiForTests(AirflowApi):
    """Clears tasks, lists runs, reads logs and answers questions as well."""

    @classmethod
    def of(cls, stack: Stack, user: str = "admin") -> ApiForTests:
        """Logged in to a stack as one of `admin`, `olga`, `uwe`, `vic`."""
        passwords = json.loads(stack.credentials_file.read_text())["airflow_passwords"]
        return cls(stack.airflow_url, user, passwords[user])

    def clear_task(self, dag_id: str, run_id: str, task_id: str) -> None:
        """Let a task run again, whatever it is doing; once more does no harm."""
        wanted = {
            "dry_run": False,
            "dag_run_id": run_id,
            "only_failed": False,
            "reset_dag_runs": True,
            "task_ids": [task_id],
        }
        retry_server_errors(self.request)(
            "POST", f"/dags/{quote_segment(dag_id)}/clearTaskInstances", wanted
        )

    def list_runs(self, dag_id: str) -> list[dict[str, Any]]:
        """The newest runs of a DAG, newest first."""
        found: list[dict[str, Any]] = self.request(
            "GET", f"/dags/{quote_segment(dag_id)}/dagRuns?order_by=-run_after&limit=50"
        )["dag_runs"]
        return found

    def task_instances(self, dag_id: str, run_id: str) -> dict[str, dict[str, Any]]:
        """Task id -> task instance of one run."""
        found = self.request("GET", f"{build_run_path(dag_id, run_id)}/taskInstances")[
            "task_instances"
        ]
        return {task["task_id"]: task for task in found}

    def read_task_log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """The task's log as text, one line per event."""
        path = f"{_build_task_path(dag_id, run_id, task_id)}/logs/{try_number}?full_content=true"
        events = self.request("GET", path)["content"]
        return "\n".join(_format_log_line(event) for event in events)

    def answer_question(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        chosen: list[str],
        params: dict[str, Any] | None = None,
    ) -> None:
        """Answer a task that waits for a person, for example with `["Approve"]`.

        Wait 3 s after it began to wait: an answer within 0.2 s fails the task although Airflow
        accepts it.
        """
        path = f"{_build_task_path(dag_id, run_id, task_id)}/-1/hitlDetails"
        self.request("PATCH", path, {"chosen_options": chosen, "params_input": params or {}})


def _build_task_path(dag_id: str, run_id: str, task_id: str) -> str:
    return f"{build_run_path(dag_id, run_id)}/taskInstances/{quote_segment(task_id)}"


def _format_log_line(event: dict[str, Any] | str) -> str:
    if isinstance(event, str):
        return event
    extra = {
        key: value
        for key, value in event.items()
        if key not in ("timestamp", "event", "level", "logger")
    }
    return " ".join(
        str(part)
        for part in (event.get("timestamp"), event.get("level"), event.get("event"), extra or None)
        if part
    )
