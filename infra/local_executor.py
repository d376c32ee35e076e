"""The executor of the local stack: Airflow's own, whose workers have the modules of tasks already.

Airflow forks a worker for each task slot when the scheduler starts, and a process of the worker for
each task. Without this, each task would import the same modules again, 1 s of processor time. That
counts when a person restores several streams at once: each restore takes two tasks.
"""

from importlib import import_module

from airflow.executors import local_executor

# What the tasks of a stream import, with the client of its bucket.
_TASK_MODULES = ("tidegate.operators.factory", "tidegate.checkpoints.s3_store", "boto3")


class LocalExecutor(local_executor.LocalExecutor):
    """Has Airflow's name, because Airflow warns of any other where logins are simple."""

    def start(self) -> None:
        """Import the modules, then fork the workers."""
        for name in _TASK_MODULES:
            import_module(name)
        super().start()
