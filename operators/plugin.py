"""Registers the Streams page, the task panel, and a task-state listener in API servers.

Every Airflow process loads this module, so it imports nothing of the page or the database.
"""

from typing import Any

import pluggy
from airflow.plugins_manager import AirflowPlugin

from tidegate.json_types import read_data_file


class _LazyApp:
    """The ASGI application of `page_api.make_app`, made at the first request."""

    def __init__(self) -> None:
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is None:
            from .page_api import make_app

            self._app = make_app()
        await self._app(scope, receive, send)


_hookimpl = pluggy.HookimplMarker("airflow")


class _TaskStateListener:
    """Acts when a person ends a stream's task.

    Only the API server calls without a previous state, and only for a person.
    """

    @_hookimpl
    def on_task_instance_success(self, previous_state: Any, task_instance: Any) -> None:
        """Marked success."""
        _forward_mark(previous_state, task_instance, "success")

    @_hookimpl
    def on_task_instance_failed(self, previous_state: Any, task_instance: Any) -> None:
        """Marked failed."""
        _forward_mark(previous_state, task_instance, "failed")

    @_hookimpl
    def on_task_instance_skipped(self, previous_state: Any, task_instance: Any) -> None:
        """Marked skipped."""
        _forward_mark(previous_state, task_instance, "skipped")


def _forward_mark(previous_state: Any, task: Any, state: str) -> None:
    if previous_state is None and task.task_id == "stream" and task.dag_id.endswith(".stream"):
        from .task_state_listener import on_task_marked

        on_task_marked(task, state)


_LISTENER = _TaskStateListener()


class _ListenerMiddleware:
    """Middleware that changes no request; it registers the listener in API servers only.

    If the plugin named the listener, every process would have it, and Airflow's DAG processor
    refuses tasks with `end_from_trigger` as soon as any plugin names a listener
    (docs/decisions/0064-manual-task-states-are-handled-in-the-api-server.md).
    """

    def __init__(self, app: Any) -> None:
        from .airflow_port.task_marks import register_listener

        self._app = app
        register_listener(_LISTENER)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


class TidegatePlugin(AirflowPlugin):
    """What Airflow shows of tidegate: a page in the navigation, and panels at DAGs and tasks."""

    name = "tidegate"
    fastapi_root_middlewares = [  # noqa: RUF012 - declared so by Airflow
        {"middleware": _ListenerMiddleware, "args": [], "kwargs": {}, "name": "tidegate"}
    ]
    fastapi_apps = [  # noqa: RUF012 - declared so by Airflow
        {"app": _LazyApp(), "url_prefix": "/tidegate", "name": "tidegate"}
    ]
    external_views = read_data_file("tidegate.operators", "provider.toml")["views"]
