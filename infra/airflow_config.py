"""How Airflow's four processes are started: commands and settings.

`airflow standalone` is not used: its log servers listen on all interfaces, and it cannot be told
not to.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tidegate.infra.local_processes import LOOPBACK
from tidegate.infra.stack_state import AIRFLOW_USERS, StackSecrets

#: Seconds that Airflow's processes wait for each other's writes; the default of 5 is too short on a
#: busy machine.
PATIENT = {"timeout": 60}
#: The same for the API server. It writes its audit log in its event loop; if another request holds
#: the database lock and waits for that loop to commit, the server waits for itself until this time
#: has passed. Callers try again. It must be shorter than the limit of any heartbeat.
IMPATIENT = {"timeout": 8}

#: Process name -> arguments of `airflow`, in the order of starting.
AIRFLOW_COMPONENTS: dict[str, tuple[str, ...]] = {
    "api-server": ("api-server",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}


def build_airflow_command(*arguments: str) -> list[str]:
    """The command line of `airflow`, from the environment this Python runs in."""
    return [sys.executable, "-m", "airflow", *arguments]


def build_airflow_url(port: int) -> str:
    """Where a browser finds Airflow."""
    return f"http://{LOOPBACK}:{port}"


def build_airflow_settings(home: Path, dags: Path, port: int, keys: StackSecrets) -> dict[str, str]:
    """Airflow's configuration, as environment variables.

    Args:
        home: AIRFLOW_HOME; also holds the database, the logs and the passwords file.
        dags: the DAGs folder.
        port: of the API server.
        keys: passwords and signing keys.
    """
    settings = {
        "CORE__DAGS_FOLDER": str(dags),
        "CORE__LOAD_EXAMPLES": "False",
        "CORE__EXECUTOR": "LocalExecutor",
        "CORE__PARALLELISM": "4",
        "CORE__FERNET_KEY": keys.fernet_key,
        "CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(
            f"{user}:{role}" for user, role in AIRFLOW_USERS.items()
        ),
        "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(locate_passwords_file(home)),
        "CORE__EXECUTION_API_SERVER_URL": f"{build_airflow_url(port)}/execution/",
        "DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home / 'airflow.db'}",
        **_build_connect_args("PATIENT"),
        "LOGGING__BASE_LOG_FOLDER": str(home / "logs"),
        "API__HOST": LOOPBACK,
        "API__PORT": str(port),
        "API__BASE_URL": build_airflow_url(port),
        "API__WORKERS": "1",
        # The processes are started one by one; without these each would make up keys of its own.
        "API__SECRET_KEY": keys.api_secret_key,
        "API_AUTH__JWT_SECRET": keys.jwt_secret,
        "DAG_PROCESSOR__PARSING_PROCESSES": "1",
        "DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "30",
        # New files are looked for every 5 minutes by default: too long for somebody who has just
        # written a pipeline.
        "DAG_PROCESSOR__REFRESH_INTERVAL": "15",
        # A parse that takes longer than the default 30 s and 50 s, or whose result meets a locked
        # database, makes every DAG of its file stale: nothing of it is started until the next good
        # one. A second a pipeline is nothing on a busy machine.
        "CORE__DAGBAG_IMPORT_TIMEOUT": "180",
        "DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "240",
        "DAG_PROCESSOR__STALE_DAG_THRESHOLD": "300",
        # A task that resumes while the API server is away, or slow, would burn one of its retries.
        # The defaults are 5 calls of 5 s each; a server that is started again on a busy machine may
        # need a minute until its first answer.
        "WORKERS__EXECUTION_API_RETRIES": "30",
        "WORKERS__EXECUTION_API_RETRY_WAIT_MAX": "10",
        "WORKERS__EXECUTION_API_TIMEOUT": "60",
        # A worker or scheduler that dies while a task launches a driver: five minutes by default
        # until anybody notices.
        "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
        "SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "30",
        "USAGE_DATA_COLLECTION__ENABLED": "False",
    }
    return {
        "AIRFLOW_HOME": str(home),
        **{f"AIRFLOW__{key}": value for key, value in settings.items()},
    }


def build_component_settings(name: str) -> dict[str, str]:
    """Return the environment variables that only this one of `AIRFLOW_COMPONENTS` gets."""
    return (
        {f"AIRFLOW__{key}": value for key, value in _build_connect_args("IMPATIENT").items()}
        if name == "api-server"
        else {}
    )


def _build_connect_args(arguments: str) -> dict[str, str]:
    return dict.fromkeys(
        ("DATABASE__SQL_ALCHEMY_CONNECT_ARGS", "DATABASE__SQL_ALCHEMY_CONNECT_ARGS_ASYNC"),
        f"{__name__}.{arguments}",
    )


def locate_passwords_file(home: Path) -> Path:
    """Where Airflow's simple login reads its passwords."""
    return home / "passwords.json"


def build_process_environment(
    own: Mapping[str, str], inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of a child.

    Ours, the user's without foreign Airflow settings, this Python's programs first on PATH.
    """
    programs = str(Path(sys.executable).parent)
    # PYTHONPATH could make the top-level folders importable under a second name.
    kept = {
        key: value
        for key, value in inherited.items()
        if not key.startswith("AIRFLOW") and key != "PYTHONPATH"
    }
    return {**kept, "PATH": f"{programs}:{inherited.get('PATH', os.defpath)}", **own}


def hash_settings(environment: Mapping[str, str]) -> str:
    """Fingerprint of settings: tells whether a running Airflow was started with these."""
    return hashlib.sha256(json.dumps(sorted(environment.items())).encode()).hexdigest()[:16]
