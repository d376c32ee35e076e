"""The one door to Airflow's internals. No other module of `operators` imports them.

Airflow promises to keep what is in `airflow.sdk`, its triggers, its plugins and its providers.
Everything else may change in any release, so it is here, with the reason why it is needed, and
tests/operators/test_airflow_port.py compares it with the Airflow that is installed. Before a new
Airflow is allowed, read that test's list.

    database       the page: DAGs, runs, questions and permissions
    task_marks     the listener: marks of people, in the API server
    running_tasks  a trigger that is ended: in what state its task is
    page_access    the page: who asks

This module imports nothing, because triggers and every DAG file load the package.
"""

from types import MappingProxyType
from typing import Final

# What the port imports -> why there is no public way.
INTERNALS: Final = MappingProxyType(
    {
        "airflow.api_fastapi.app": "asks the auth manager what a user may see and start",
        "airflow.api_fastapi.auth.managers.models.resource_details": "names what is asked about",
        "airflow.api_fastapi.core_api.security": "guards the page's routes as Airflow's own",
        "airflow.listeners.listener": (
            "registers the listener in API servers alone; a plugin that names one makes the DAG"
            " processor refuse tasks with end_from_trigger"
        ),
        "airflow.models.connection": "reads a store's connection outside of a task",
        "airflow.models.dag": "lists the streams, whether they are paused or stale, and their tags",
        "airflow.models.dagrun": "counts and shows runs; the API would need a log-in of the page",
        "airflow.models.errors": "tells a stale DAG whose file has errors from one that is removed",
        "airflow.models.hitl": "shows a question that waits, and why an answer would not count",
        "airflow.models.serialized_dag": "reads the text about broken specs",
        "airflow.models.taskinstance": "shows the tasks of a run, and whether a mark still holds",
        "airflow.sdk.execution_time.task_runner": (
            "asks for a task's state and the number of runs, in a trigger that is being ended"
        ),
        "airflow.utils.session": "opens a session for all of these",
        "sqlalchemy": "asks the models; Airflow's own version of it",
        "sqlalchemy.exc": "tells a database that is away from a fault",
        "sqlalchemy.orm": "waits until the request that marks a task is committed",
    }
)
