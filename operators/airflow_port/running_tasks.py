"""What a trigger that is being ended asks Airflow about its task."""

from typing import Any


def count_other_runs(task: Any) -> int:
    """Return how many other runs of the stream want its driver.

    The task's own run may still count as running for a moment.
    """
    # Late, here and below: every DAG file loads this module.
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    all_runs, this_run = (
        RuntimeTaskInstance.get_dr_count(
            dag_id=task.dag_id, run_ids=ids, states=["queued", "running"]
        )
        for ids in (None, [task.run_id])
    )
    return all_runs - this_run


def read_task_state(task: Any) -> str | None:
    """Return the task's state as Airflow has it now; None without one."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    states = RuntimeTaskInstance.get_task_states(
        dag_id=task.dag_id, task_ids=[task.task_id], run_ids=[task.run_id]
    )
    state = states.get(task.run_id, {}).get(task.task_id)
    return None if state is None else str(getattr(state, "value", state))
