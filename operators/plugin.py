"""Airflow's hook into the page. Loaded by every Airflow process, so it imports nothing: the app is made at its first request."""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin

__all__ = ["TidegatePlugin"]


class _LazyApp:
    """The ASGI application of `page.make_app`, made when somebody first asks for it."""

    def __init__(self) -> None:
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is None:
            from tidegate.operators.page import make_app

            self._app = make_app()
        await self._app(scope, receive, send)


class TidegatePlugin(AirflowPlugin):
    """One entry in the navigation, one panel beside the tasks of a stream."""

    name = "tidegate"
    fastapi_apps = [  # noqa: RUF012 - declared so by Airflow
        {"app": _LazyApp(), "url_prefix": "/tidegate", "name": "tidegate"}
    ]
    external_views = [  # noqa: RUF012 - declared so by Airflow
        {
            "name": "Streams",
            "href": "/tidegate/page",
            "destination": "nav",
            "url_route": "streams",
            "category": "browse",
        },
        {
            "name": "Stream",
            "href": "/tidegate/page?dag={DAG_ID}",
            "destination": "dag",
            "url_route": "stream",
        },
        {
            "name": "Stream",
            "href": "/tidegate/page?dag={DAG_ID}&run={RUN_ID}&task={TASK_ID}",
            "destination": "task_instance",
            "url_route": "stream-task",
        },
    ]
