"""The supervising task, run without Airflow and with a launcher that starts nothing."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from airflow.sdk.exceptions import TaskDeferred
from airflow.sdk.execution_time.context import NEVER_EXPIRE

from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.jobs.spec.operations import SupervisionSpec
from tidegate.operators.driver_launch import LaunchedDriver
from tidegate.operators.stream_operator import (
    RelaunchBudget,
    StreamOperator,
)

HERE = ProcessIdentity(driver="d", host="elsewhere", boot="b", namespace="n", pid=7, start_ticks=9)


class NotingLauncher:
    """Starts nothing."""

    started: ClassVar[list[str]] = []
    standby: ClassVar[list[bool]] = []

    @classmethod
    def launch(
        cls, pipeline: str, spec: str, access: Any, recover_to: str, *, submit: Any, standby: bool
    ) -> LaunchedDriver:
        cls.started.append(recover_to)
        cls.standby.append(standby)
        return LaunchedDriver(f"attempt-{len(cls.started)}", "/nowhere/log", HERE, "/nowhere/exit")


def make_operator() -> StreamOperator:
    """The task that supervises pipeline `p`."""
    options = SupervisionSpec(retries=2, rotate_after=None)
    return StreamOperator(task_id="stream", pipeline="p", spec="p.yaml", supervision=options)


class Memory(dict[str, Any]):
    """The task state store of one task."""

    def set(self, key: str, value: Any, *, retention: Any) -> None:
        assert retention is NEVER_EXPIRE
        self[key] = value


def make_context(
    try_number: int = 1, max_tries: int = 2, queued: int = 0, memory: Memory | None = None
) -> dict[str, Any]:
    """The context of a try; a later one remembers that it set `run`, unless `memory` is given."""
    task = SimpleNamespace(
        try_number=try_number, max_tries=max_tries, get_dr_count=lambda **_: queued
    )
    known = (
        Memory({"run_declared_by_try": 2} if try_number > 1 else {}) if memory is None else memory
    )
    return {"run_id": "r", "ti": task, "dag_run": None, "task_state_store": known}


def execute_stream(**task: Any) -> TaskDeferred:
    """Run a try of the task until it defers."""
    with pytest.raises(TaskDeferred) as deferred:
        make_operator().execute(make_context(**task))
    return deferred.value


def make_event(state: str, error: dict[str, str]) -> dict[str, Any]:
    """What the trigger reports about the driver with token 1."""
    return {"state": state, "why": "because", "token": 1, "error": error}


def resume_stream(
    state: str, error: dict[str, str] | None = None, budget: RelaunchBudget | None = None
) -> Any:
    """Let the task go on after the trigger saw the driver in `state`."""
    return make_operator().resume(
        make_context(), make_event(state, error or {}), None, asdict(budget or RelaunchBudget())
    )
