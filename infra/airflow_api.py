"""Calls Airflow's REST API for the demo and the end-to-end tests."""

from __future__ import annotations

import json
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tenacity import retry, retry_if_exception, stop_after_attempt, wait_random_exponential

from tidegate.errors import ConfigurationError
from tidegate.infra.errors import AIRFLOW_AWAY, AIRFLOW_WAIT_ENDED

_REQUEST_TIMEOUT = 120.0  # seconds; a busy machine takes its time
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


def fetch_health(base_url: str) -> dict[str, str]:
    """Return component -> status, with the names of the processes; empty without an answer."""
    try:
        with urllib.request.urlopen(f"{base_url}/api/v2/monitor/health", timeout=20) as answer:  # noqa: S310 - http on loopback
            report = json.loads(answer.read())
    except (OSError, ValueError):
        return {}
    statuses = {
        name.replace("_", "-"): str((part or {}).get("status")) for name, part in report.items()
    }
    return {"api-server": "healthy", **statuses}


def _is_server_error(error: BaseException) -> bool:
    return isinstance(error, AirflowApiError) and error.status >= 500


retry_server_errors = retry(
    retry=retry_if_exception(_is_server_error),
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

    def get_dag(self, dag_id: str) -> dict[str, Any] | None:
        """Return the DAG, or None while Airflow has not parsed it."""
        try:
            found: dict[str, Any] = self.request("GET", f"/dags/{quote_segment(dag_id)}")
        except AirflowApiError as error:
            if error.status == 404:
                return None
            raise
        return found

    def wait_for_dag(self, dag_id: str, timeout: float = 360.0) -> dict[str, Any]:
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

    def trigger_dag(
        self, dag_id: str, conf: dict[str, Any] | None = None, run_id: str | None = None
    ) -> str:
        """Start a run with these params and return its id; a new id unless one is given.

        Raises:
            AirflowApiError: it was refused, with status 409 if there is a run with the given id:
                perhaps of an earlier try of this call, because an answer of 500 and above is
                followed by up to five more.
            TransientError: no answer.
        """
        run = run_id or f"manual__{datetime.now(UTC).isoformat()}__{secrets.token_hex(4)}"
        body = {"logical_date": None, "conf": conf or {}, "dag_run_id": run}
        try:
            retry_server_errors(self.request)(
                "POST", f"/dags/{quote_segment(dag_id)}/dagRuns", body
            )
        except AirflowApiError as error:
            # No other caller knows an id made here: the run exists because an earlier call
            # succeeded that answered 500.
            if error.status != 409 or run_id is not None:
                raise
        return run

    def get_run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """Return one run; its `state` is queued, running, success or failed."""
        found: dict[str, Any] = self.request("GET", build_run_path(dag_id, run_id))
        return found

    def wait_for_run(self, dag_id: str, run_id: str, timeout: float) -> dict[str, Any]:
        """Wait until a run has ended, with success or not, and return it.

        Raises:
            TransientError: it still runs after `timeout` seconds.
        """

        def fetch_ended_run() -> dict[str, Any] | None:
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
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        url = self.base_url + path
        request = urllib.request.Request(url, data=data, headers=headers, method=method)  # noqa: S310 - http on loopback
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_TIMEOUT) as answer:  # noqa: S310 - http on loopback
                content = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read().decode(errors="replace")[:500]
            raise AirflowApiError(
                f"{method} {path}: {error.code} {detail}", status=error.code
            ) from None
        except OSError as error:
            raise AIRFLOW_AWAY(url=self.base_url, error=error) from error
        return json.loads(content) if content else None


def build_run_path(dag_id: str, run_id: str) -> str:
    """Return the path of a run, for `AirflowApi.request`."""
    return f"/dags/{quote_segment(dag_id)}/dagRuns/{quote_segment(run_id)}"


def quote_segment(part: str) -> str:
    """Return a part of a path with slashes and other reserved characters encoded."""
    return urllib.parse.quote(part, safe="")


def _poll_until(
    ask: Callable[[], dict[str, Any] | None], timeout: float, complaint: Callable[[], str]
) -> dict[str, Any]:
    deadline = time.monotonic() + timeout
    while (found := ask()) is None:
        if time.monotonic() > deadline:
            raise AIRFLOW_WAIT_ENDED(seconds=timeout, complaint=complaint())
        time.sleep(0.5)
    return found
