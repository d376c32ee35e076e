"""Airflow's internals are used in one place, and are as that place expects them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.json_types import read_data_file
from tidegate.operators.airflow_port.database import AirflowQueries

OPERATORS = Path(__file__).parents[2] / "operators"
PORT = OPERATORS / "airflow_port"
INTERNALS = read_data_file("tidegate.operators.airflow_port", "internals.toml")  # with the reasons
# What Airflow documents for tasks, triggers and plugins.
PUBLIC = ("airflow.sdk", "airflow.triggers.base", "airflow.plugins_manager", "airflow.providers")
# Airflow's own part of its SDK.
PRIVATE = ("airflow.sdk.execution_time.task_runner", "airflow.sdk.definitions._internal")

# Module -> name in it -> the attributes or parameters that the port uses.
USED: dict[str, dict[str, tuple[str, ...]]] = {
    "airflow.models.connection": {"Connection.get_connection_from_secrets": ("conn_id",)},
    "airflow.models.dag": {
        "DagModel": (
            *("dag_id", "is_stale", "is_paused", "tags", "bundle_name", "relative_fileloc"),
            *("last_parsed_time", "get_team_name"),
        )
    },
    "airflow.models.dagrun": {
        "DagRun": (
            *("dag_id", "run_id", "state", "run_after", "start_date", "end_date", "conf"),
            "triggering_user_name",
        )
    },
    "airflow.models.errors": {"ParseImportError": ("bundle_name", "filename")},
    "airflow.models.hitl": {
        "HITLDetail": (
            *("ti_id", "subject", "body", "options", "assignees", "created_at", "responded_at"),
        )
    },
    "airflow.models.serialized_dag": {
        "SerializedDagModel": ("data",),
        "SerializedDagModel.get": ("dag_id", "session"),
    },
    "airflow.models.taskinstance": {
        "TaskInstance": ("id", "dag_id", "run_id", "task_id", "state", "start_date", "trigger_id")
    },
    "airflow.sdk.execution_time.task_runner": {
        "RuntimeTaskInstance.get_dr_count": ("dag_id", "run_ids", "states"),
        "RuntimeTaskInstance.get_task_states": ("dag_id", "task_ids", "run_ids"),
    },
    "airflow.listeners.listener": {"get_listener_manager": ()},
    "airflow.utils.session": {"create_session": ()},
    "airflow.api_fastapi.app": {"get_auth_manager": ()},
    "airflow.api_fastapi.auth.managers.models.resource_details": {
        "DagAccessEntity": ("RUN", "HITL_DETAIL"),
        "DagDetails": ("id", "team_name"),
        "AccessView": ("WEBSITE",),
    },
    "airflow.api_fastapi.core_api.security": {
        "requires_access_dag": ("method",),
        "requires_access_view": ("access_view",),
        "GetUserDep": (),
    },
}


def _list_imports(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            yield from ((path, name) for name in names)


def _is_below(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _is_internal(name: str) -> bool:
    if _is_below(name, ("sqlalchemy", *PRIVATE)):
        return True
    return _is_below(name, ("airflow",)) and not _is_below(name, PUBLIC)


def test_no_other_module_imports_internals() -> None:
    """A new Airflow is judged in one place."""
    found = [
        f"{path.name}: {name}"
        for path, name in _list_imports(OPERATORS)
        if PORT not in path.parents and _is_internal(name)
    ]
    assert found == []


def test_each_internal_has_its_reason() -> None:
    """The list is what the port imports, neither more nor less."""
    assert {name for _, name in _list_imports(PORT) if _is_internal(name)} == set(INTERNALS)
    assert set(USED) == {name for name in INTERNALS if name.startswith("airflow.")}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in USED.items() for name in names]
)
def test_the_installed_airflow_is_as_expected(module: str, name: str) -> None:
    """Each name is there, with the attributes or the parameters that are used."""
    found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    used = set(USED[module][name])
    known = set(dir(found)) | set(getattr(found, "__annotations__", ()))
    known |= set(getattr(found, "model_fields", ())) | set(
        getattr(found, "__dataclass_fields__", ())
    )
    if used and inspect.isroutine(found):
        known = set(inspect.signature(found).parameters)
    assert used <= known


def test_a_run_began_when_airflow_began_it() -> None:
    """A scheduled run may have been due hours before, when Airflow was not there."""
    due, begun = datetime(2026, 1, 1, 3, 30, tzinfo=UTC), datetime(2026, 1, 1, 11, tzinfo=UTC)
    run: Any = SimpleNamespace(
        dag_id="p.maintain",
        run_id="r",
        state="success",
        triggering_user_name=None,
        run_after=due,
        start_date=begun,
        end_date=None,
        conf=None,
    )
    waits: Any = SimpleNamespace(**{**vars(run), "start_date": None})
    shown = [AirflowQueries()._describe_run(None, one, [])["at"] for one in (run, waits)]
    assert shown == [begun.timestamp() * 1000, due.timestamp() * 1000]
