"""Airflow's four processes: prepared, started, adopted, watched until they are well."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from tidegate.errors import TransientError
from tidegate.infra import airflow_config
from tidegate.infra.airflow_api import fetch_health
from tidegate.infra.local_processes import (
    ProcessId,
    is_process_alive,
    kill_processes,
    spawn_process,
    stop_processes,
)
from tidegate.infra.progress import TimedProgress
from tidegate.infra.stack_state import StackState

# 27 s on two idle cores; a busy machine may need many times that, and one that ends is seen at
# once.
_HEALTHY_WITHIN = 900.0


class AirflowProcesses:
    """Brings the processes noted in a stack's state to life.

    Args:
        home: the stack's folder.
        settings: Airflow's settings and what its children need, as environment variables.
        state: the stack's state; changed in place.
        save: called after every change, so that a killed command leaves no unknown process.
        say: told about every step.
    """

    def __init__(
        self,
        home: Path,
        settings: Mapping[str, str],
        state: StackState,
        save: Callable[[], None],
        say: TimedProgress,
    ) -> None:
        self._home = home
        self._settings = settings
        self._env = airflow_config.build_process_environment(settings)
        self._state = state
        self._save = save
        self._say = say

    def restart_if_changed(self) -> None:
        """Stop processes that were started with other settings or addresses.

        They would never learn the new ones.
        """
        wanted = airflow_config.hash_settings(self._settings)
        if self._state.airflow_digest == wanted:
            return
        running = [
            mark for name, mark in self._recorded_processes().items() if is_process_alive(mark)
        ]
        if running:
            self._say("addresses or settings have changed: restarting Airflow")
            stop_processes(running, grace=15.0)
        self._state.airflow_digest = wanted
        self._save()

    def migrate_database(self) -> None:
        """Prepare the metadata database; once per Airflow version.

        Raises:
            TransientError: it failed; the message names the log.
        """
        wanted = version("apache-airflow")
        if self._state.migrated == wanted:
            return
        self._say("preparing Airflow's database (about 10 s)")
        log = self._log_file("db-migrate")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            command = airflow_config.build_airflow_command("db", "migrate")
            done = subprocess.run(
                command,
                stdout=output,
                stderr=output,
                env=self._env,
                cwd=self._home / "airflow",
                check=False,
            )
        if done.returncode != 0:
            raise _build_start_error("Airflow's database could not be prepared", log)
        self._state.migrated = wanted
        self._save()

    def start(self) -> None:
        """Start what does not run."""
        marks = self._recorded_processes()
        missing = [
            name
            for name in airflow_config.AIRFLOW_COMPONENTS
            if name not in marks or not is_process_alive(marks[name])
        ]
        if missing:
            self._say(f"starting Airflow: {', '.join(missing)} (about 20 s)")
        # A crashed triggerer or scheduler leaves children that would go on beside the new one.
        kill_processes(marks[name] for name in missing if name in marks)
        for name in missing:
            command = airflow_config.build_airflow_command(*airflow_config.AIRFLOW_COMPONENTS[name])
            env = self._env | airflow_config.build_component_settings(name)
            self._state.processes[name] = spawn_process(
                command, log=self._log_file(name), env=env, cwd=self._home / "airflow"
            )
            self._save()

    def wait_until_healthy(self) -> None:
        """Wait until every part reports that it is healthy.

        Raises:
            TransientError: one ended, or did not get well in time; the message names its log.
        """
        waiting = {*airflow_config.AIRFLOW_COMPONENTS, "metadatabase"}
        deadline = time.monotonic() + _HEALTHY_WITHIN
        while waiting:
            well = waiting - list_unhealthy_components(self._state.ports["airflow"])
            if well:
                self._say(f"Airflow is well: {', '.join(sorted(well))}")
            waiting -= well
            self._check_alive()
            if waiting and time.monotonic() > deadline:
                message = (
                    f"Airflow did not get well in {_HEALTHY_WITHIN:.0f} s:"
                    f" {', '.join(sorted(waiting))}"
                )
                raise _build_start_error(
                    message,
                    self._log_file(
                        min(waiting & set(airflow_config.AIRFLOW_COMPONENTS), default="api-server")
                    ),
                )
            time.sleep(0.25)

    def _check_alive(self) -> None:
        for name, mark in self._recorded_processes().items():
            if not is_process_alive(mark):
                raise _build_start_error(
                    f"Airflow's {name} ended while starting", self._log_file(name)
                )

    def _recorded_processes(self) -> dict[str, ProcessId]:
        return {
            name: mark
            for name, mark in self._state.processes.items()
            if name in airflow_config.AIRFLOW_COMPONENTS
        }

    def _log_file(self, name: str) -> Path:
        return self._home / "logs" / f"{name}.log"


def list_unhealthy_components(port: int) -> set[str]:
    """The components that do not say they are healthy.

    All of them while the API server does not answer.
    """
    answers = fetch_health(airflow_config.build_airflow_url(port))
    if not answers:
        return {*airflow_config.AIRFLOW_COMPONENTS, "metadatabase"}
    return {name for name, status in answers.items() if status != "healthy"}


def _build_start_error(message: str, log: Path) -> TransientError:
    return TransientError(
        message,
        code="infra.airflow_start",
        advice=f"read {log}; then `tidegate down` and `tidegate up`",
    )
