"""Airflow's four processes: their settings, how they are started and watched, and their REST API.

`airflow standalone` is not used: its log servers listen on all interfaces, and no option changes
that.
"""

import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tenacity import retry, retry_if_exception, stop_after_attempt, wait_random_exponential
from urllib3 import PoolManager
from urllib3.exceptions import HTTPError

from tidegate.checkpoints.host_clock import poll_until
from tidegate.errors import ConfigurationError
from tidegate.json_types import JsonObject, read_data_file

from .errors import AIRFLOW_AWAY, AIRFLOW_NOT_STARTED, AIRFLOW_WAIT_ENDED
from .local_processes import (
    LOOPBACK,
    ProcessId,
    is_process_alive,
    kill_processes,
    spawn_process,
    stop_processes,
)
from .stack_state import AIRFLOW_USERS, Progress, StackSecrets, StackState

# Seconds; a busy machine takes its time. Callers repeat what may be repeated.
_http = PoolManager(timeout=120.0, retries=False)
_ENDED_RUN_STATES = frozenset({"success", "failed"})
_MAX_ATTEMPTS = 6  # of a call that Airflow answered with 500 and above


class AirflowApiError(ConfigurationError):
    """Airflow answered with an error.

    Attributes:
        status: the HTTP status, for example 403 or 404.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message, code=f"infra.airflow_api_{status}")
        self.status = status


retry_server_errors = retry(
    retry=retry_if_exception(
        lambda error: isinstance(error, AirflowApiError) and error.status >= 500
    ),
    stop=stop_after_attempt(_MAX_ATTEMPTS),
    wait=wait_random_exponential(0.2, max=3),
    reraise=True,
)


class AirflowApi:
    """Calls the API as one user; logs in by itself, and again when the token has run out.

    Every method raises `AirflowApiError` when Airflow refuses and `TransientError` when it does not
    answer.
    """

    def __init__(self, base_url: str, user: str, password: str) -> None:
        self.base_url = base_url.rstrip("/")
        self.user = user
        self._password = password
        self._token: str | None = None

    def request(self, method: str, path: str, body: object = None) -> Any:
        """Call `/api/v2<path>` and return the decoded answer; None if it is empty.

        On SQLite a request that meets another writer fails at once, whatever the lock's time-out.
        So all requests but POST are made up to six times while Airflow answers with 500 and above.

        Raises:
            AirflowApiError: any answer of 400 and above.
            TransientError: no answer.
        """
        if self._token is None:
            self._log_in()
        call = self._send_request if method == "POST" else retry_server_errors(self._send_request)
        try:
            return call(method, f"/api/v2{path}", body)
        except AirflowApiError as error:
            if error.status != 401:
                raise
            self._log_in()
            return call(method, f"/api/v2{path}", body)

    def get_dag(self, dag_id: str) -> JsonObject | None:
        """Return the DAG, or None while Airflow has not parsed it."""
        try:
            found: JsonObject = self.request("GET", f"/dags/{quote_segment(dag_id)}")
        except AirflowApiError as error:
            if error.status == 404:
                return None
            raise
        return found

    def wait_for_dag(self, dag_id: str, timeout: float = 360.0) -> JsonObject:
        """Wait until Airflow has parsed the DAG, at most `timeout` seconds.

        Raises:
            TransientError: it has not parsed it in time; the message has the import errors.
        """
        return _poll_until(
            lambda: self.get_dag(dag_id),
            timeout,
            lambda: f"no DAG {dag_id}; import errors: {self.import_errors()}",
        )

    def import_errors(self) -> dict[str, str]:
        """Return file -> traceback of the DAG files that could not be parsed."""
        errors = self.request("GET", "/importErrors")["import_errors"]
        return {error["filename"]: error["stack_trace"] for error in errors}

    def pause(self, dag_id: str, paused: bool = True) -> None:
        """Pause or unpause a DAG."""
        self.request("PATCH", f"/dags/{quote_segment(dag_id)}", {"is_paused": paused})

    def unpause(self, dag_id: str) -> None:
        """Let a DAG run."""
        self.pause(dag_id, paused=False)

    def trigger_dag(self, dag_id: str, conf: JsonObject | None = None) -> str:
        """Start a run with these params and return its id; a new id unless one is given.

        Raises:
            AirflowApiError: it was refused, with status 409 if there is a run with the given id:
                perhaps of an earlier try of this call, because an answer of 500 and above is
                followed by up to five more.
            TransientError: no answer.
        """
        run = f"manual__{datetime.now(UTC).isoformat()}__{secrets.token_hex(4)}"
        body = {"logical_date": None, "conf": conf or {}, "dag_run_id": run}
        try:
            retry_server_errors(self.request)(
                "POST", f"/dags/{quote_segment(dag_id)}/dagRuns", body
            )
        except AirflowApiError as error:
            # No other caller knows an id made here: the run exists because an earlier call
            # succeeded that answered 500.
            if error.status != 409:
                raise
        return run

    def get_run(self, dag_id: str, run_id: str) -> JsonObject:
        """Return one run; its `state` is queued, running, success or failed."""
        found: JsonObject = self.request("GET", build_run_path(dag_id, run_id))
        return found

    def wait_for_run(self, dag_id: str, run_id: str, timeout: float) -> JsonObject:
        """Wait until a run has ended, with success or not, and return it.

        Raises:
            TransientError: it still runs after `timeout` seconds.
        """

        def fetch_ended_run() -> JsonObject | None:
            """The run, once it has ended."""
            run = self.get_run(dag_id, run_id)
            return run if run["state"] in _ENDED_RUN_STATES else None

        return _poll_until(
            fetch_ended_run,
            timeout,
            lambda: f"{dag_id} run {run_id} is {self.get_run(dag_id, run_id)['state']}",
        )

    def _log_in(self) -> None:
        self._token = None
        self._token = retry_server_errors(self._send_request)(
            "POST", "/auth/token", {"username": self.user, "password": self._password}
        )["access_token"]

    def _send_request(self, method: str, path: str, body: object) -> Any:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            answer = _http.request(method, self.base_url + path, json=body, headers=headers)
        except HTTPError as error:
            raise AIRFLOW_AWAY(url=self.base_url, error=error) from error
        if answer.status >= 400:
            detail = answer.data.decode(errors="replace")[:500]
            raise AirflowApiError(
                f"{method} {path}: {answer.status} {detail}", status=answer.status
            )
        return answer.json() if answer.data else None


def build_run_path(dag_id: str, run_id: str) -> str:
    """Return the path of a run, for `AirflowApi.request`."""
    return f"/dags/{quote_segment(dag_id)}/dagRuns/{quote_segment(run_id)}"


def quote_segment(part: str) -> str:
    """Return a part of a path with slashes and other reserved characters encoded."""
    return quote(part, safe="")


def _poll_until(
    ask: Callable[[], JsonObject | None], timeout: float, complaint: Callable[[], str]
) -> JsonObject:
    found = poll_until(ask, timeout, 0.5)
    if found is None:
        raise AIRFLOW_WAIT_ENDED(seconds=timeout, complaint=complaint())
    return found


#: Seconds that Airflow's processes wait for each other's writes; the default of 5 is too short on a
#: busy machine.
PATIENT = {"timeout": 60}
#: The same for the API server. It writes its audit log in its event loop; if another request holds
#: the database lock and waits for that loop to commit, the server waits for itself until this time
#: has passed. Callers try again. It must be shorter than the limit of any heartbeat.
IMPATIENT = {"timeout": 8}

#: Process name, which is also the command of `airflow`, -> its options, in the order of starting.
AIRFLOW_COMPONENTS: dict[str, tuple[str, ...]] = {
    "api-server": (),
    "scheduler": ("--skip-serve-logs",),
    "dag-processor": (),
    "triggerer": ("--skip-serve-logs",),
}
_CONNECT_ARGS = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS"
#: Process name -> environment variables that only this process gets.
COMPONENT_SETTINGS = {
    "api-server": dict.fromkeys((_CONNECT_ARGS, f"{_CONNECT_ARGS}_ASYNC"), f"{__name__}.IMPATIENT")
}


def build_airflow_command(*arguments: str) -> list[str]:
    """Return the command line of `airflow` in the environment of this Python."""
    return [sys.executable, "-m", "airflow", *arguments]


def build_airflow_url(port: int) -> str:
    """Return the address of Airflow for a browser."""
    return f"http://{LOOPBACK}:{port}"


def build_airflow_settings(home: Path, dags: Path, port: int, keys: StackSecrets) -> dict[str, str]:
    """Return Airflow's configuration as environment variables.

    Args:
        home: AIRFLOW_HOME; also holds the database, the logs and the passwords file.
        dags: the DAGs folder.
        port: of the API server.
        keys: passwords and signing keys.
    """
    settings = read_data_file("tidegate.infra", "airflow.toml")
    settings |= {
        "CORE__DAGS_FOLDER": str(dags),
        "CORE__FERNET_KEY": keys.fernet_key,
        "CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(
            f"{user}:{role}" for user, role in AIRFLOW_USERS.items()
        ),
        "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(locate_passwords_file(home)),
        "CORE__EXECUTION_API_SERVER_URL": f"{build_airflow_url(port)}/execution/",
        "DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home / 'airflow.db'}",
        "LOGGING__BASE_LOG_FOLDER": str(home / "logs"),
        "API__HOST": LOOPBACK,
        "API__PORT": str(port),
        "API__BASE_URL": build_airflow_url(port),
        # The processes are started one by one; without these each would make up keys of its own.
        "API__SECRET_KEY": keys.api_secret_key,
        "API_AUTH__JWT_SECRET": keys.jwt_secret,
    }
    return {
        "AIRFLOW_HOME": str(home),
        # The connection of the Spark provider, for specs with `supervision.submit`.
        "AIRFLOW_CONN_SPARK_DEFAULT": '{"conn_type": "spark", "host": "local[2]"}',
        **{f"AIRFLOW__{key}": value for key, value in settings.items()},
    }


def locate_passwords_file(home: Path) -> Path:
    """Return the file from which Airflow's simple login reads its passwords."""
    return home / "passwords.json"


def build_process_environment(
    own: Mapping[str, str], inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of a child process.

    It has the `own` settings, the inherited ones without Airflow's and without PYTHONPATH, and this
    Python's programs first on PATH.
    """
    programs = str(Path(sys.executable).parent)
    # PYTHONPATH could make the top-level folders importable under a second name.
    kept = {
        key: value
        for key, value in inherited.items()
        if not key.startswith("AIRFLOW") and key != "PYTHONPATH"
    }
    return {**kept, "PATH": f"{programs}:{inherited.get('PATH', os.defpath)}", **own}


# 27 s on two idle cores; a busy machine may need many times that, and one that ends is seen at
# once.
_HEALTHY_WITHIN = 900.0


@dataclass(frozen=True)
class AirflowProcesses:
    """Starts the processes that a stack's state names, and adopts those that run.

    Attributes:
        home: the stack's folder.
        settings: Airflow's settings and what its children need, as environment variables.
        state: the stack's state; changed in place.
        save: called after every change, so that a killed command leaves no unknown process.
        say: called with a line per step.
    """

    home: Path
    settings: Mapping[str, str] = field(repr=False)
    state: StackState
    save: Callable[[], None]
    say: Progress

    def restart_if_changed(self) -> None:
        """Stop processes that were started with other settings; `start` then starts them again."""
        wanted = hashlib.sha256(json.dumps(sorted(self.settings.items())).encode()).hexdigest()[:16]
        if self.state.airflow_digest == wanted:
            return
        running = [
            mark for name, mark in self._recorded_processes().items() if is_process_alive(mark)
        ]
        if running:
            self.say("addresses or settings have changed: restarting Airflow")
            stop_processes(running, grace=15.0)
        self.state.airflow_digest = wanted
        self.save()

    def migrate_database(self) -> None:
        """Prepare the metadata database; once per Airflow version.

        Raises:
            TransientError: it failed; the message names the log.
        """
        wanted = version("apache-airflow")
        # Once per version of Airflow, because the command takes about 10 s.
        if self.state.migrated == wanted:
            return
        self.say("preparing Airflow's database (about 10 s)")
        log = self._log_file("db-migrate")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            command = build_airflow_command("db", "migrate")
            done = subprocess.run(
                command,
                stdout=output,
                stderr=output,
                env=build_process_environment(self.settings),
                cwd=self.home / "airflow",
                check=False,
            )
        if done.returncode != 0:
            what = "Airflow's database could not be prepared"
            raise AIRFLOW_NOT_STARTED(what=what, log=log)
        # Only after success, so that an interrupted migration is run again.
        self.state.migrated = wanted
        self.save()

    def start(self) -> None:
        """Start the processes that do not run, and return at once.

        Children that an ended process has left are killed first.
        """
        marks = self._recorded_processes()
        missing = [
            name
            for name in AIRFLOW_COMPONENTS
            if name not in marks or not is_process_alive(marks[name])
        ]
        if missing:
            self.say(f"starting Airflow: {', '.join(missing)} (about 20 s)")
        # A crashed triggerer or scheduler leaves children that would run next to the new one's.
        kill_processes(marks[name] for name in missing if name in marks)
        for name in missing:
            command = build_airflow_command(name, *AIRFLOW_COMPONENTS[name])
            env = build_process_environment(self.settings) | COMPONENT_SETTINGS.get(name, {})
            self.state.processes[name] = spawn_process(
                command, log=self._log_file(name), env=env, cwd=self.home / "airflow"
            )
            self.save()

    def wait_until_healthy(self) -> None:
        """Wait until every component reports that it is healthy.

        Raises:
            TransientError: one ended, or was not healthy within 15 minutes; the message names its
                log.
        """
        waiting = {*AIRFLOW_COMPONENTS, "metadatabase"}
        deadline = time.monotonic() + _HEALTHY_WITHIN
        while waiting:
            well = waiting - list_unhealthy_components(self.state.ports["airflow"])
            if well:
                self.say(f"Airflow is well: {', '.join(sorted(well))}")
            waiting -= well
            # A busy machine may be slow, but a process that has ended never becomes healthy.
            for name, mark in self._recorded_processes().items():
                if not is_process_alive(mark):
                    what = f"Airflow's {name} ended while starting"
                    raise AIRFLOW_NOT_STARTED(what=what, log=self._log_file(name))
            if waiting and time.monotonic() > deadline:
                parts = ", ".join(sorted(waiting))
                what = f"Airflow did not get well in {_HEALTHY_WITHIN:.0f} s: {parts}"
                name = min(waiting & set(AIRFLOW_COMPONENTS), default="api-server")
                raise AIRFLOW_NOT_STARTED(what=what, log=self._log_file(name))
            time.sleep(0.25)

    def _recorded_processes(self) -> dict[str, ProcessId]:
        return {
            name: mark for name, mark in self.state.processes.items() if name in AIRFLOW_COMPONENTS
        }

    def _log_file(self, name: str) -> Path:
        return self.home / "logs" / f"{name}.log"


def list_unhealthy_components(port: int) -> set[str]:
    """Return the components that do not report that they are healthy.

    All of them if there is no answer: the API server may still be starting.
    """
    components = {*AIRFLOW_COMPONENTS, "metadatabase"}
    url = f"{build_airflow_url(port)}/api/v2/monitor/health"
    try:
        answer = _http.request("GET", url, timeout=20, retries=False)
        report = answer.json() if answer.status == 200 else None
    except (HTTPError, ValueError):
        report = None
    if report is None:
        return components
    found = {name: report.get(name.replace("-", "_")) or {} for name in components}
    return {n for n, part in found.items() if part.get("status") != "healthy"} - {"api-server"}
