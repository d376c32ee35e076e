"""The local stack: one MinIO and one Airflow on 127.0.0.1, with their state in one folder.

    stack.json         ports, pids and start ticks
    credentials.json   logins and keys, mode 0600
    minio-data/        the bucket
    airflow/           AIRFLOW_HOME: database and task logs
    logs/              output of every process

`up` may be repeated: it adopts the processes that run, and starts the others again under the same
addresses.
"""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.checkpoints.alert_delivery import ALERTS_VARIABLE

from . import airflow_processes
from .airflow_processes import AirflowApi, AirflowProcesses, list_unhealthy_components
from .errors import NO_ALERT_VARIABLE, NO_DAGS_FOLDER, STACK_NEVER_UP
from .local_processes import (
    choose_free_port,
    find_processes_with,
    is_process_alive,
    kill_processes,
    read_program_name,
    stop_processes,
)
from .minio_server import MinioServer, ensure_minio, provision_bucket
from .provision import REGION
from .stack_state import (
    Progress,
    StackSecrets,
    StackState,
    add_times,
    lock_stack,
    write_private_json,
)

_DRIVER_GRACE = 20.0  # a driver seals its epoch before it ends


_OWN_DAGS = Path(__file__).resolve().parents[1] / "dags"
"""The DAG files: of the checkout with its specs, of an installed wheel without any."""


def find_default_dags() -> Path:
    """Return `dags/` of the current folder, else of the checkout this code runs from.

    If neither exists, the former.
    """
    here = Path.cwd() / "dags"
    is_checkout = (_OWN_DAGS / "pipelines").is_dir()
    return _OWN_DAGS if is_checkout and not here.is_dir() else here


def make_dags_folder(folder: Path) -> None:
    """Make a folder of DAGs with the files that build them, and a folder for specs in it."""
    (folder / "pipelines").mkdir(parents=True)
    for file in _OWN_DAGS.glob("tidegate_*.py"):
        shutil.copyfile(file, folder / file.name)


@dataclass(frozen=True)
class StackSettings:
    """What may differ between stacks.

    Attributes:
        home: folder of the stack's state.
        dags: folder Airflow parses.
        pipelines: folder of pipeline specs; default: `pipelines` in the DAGs folder.
        bucket: name of the bucket.
        alerts: receiver and variable of the alerts of pipelines whose spec has none; None: those of
            the call of `up` before; `NO_ALERTS`: none from now on.
    """

    home: Path = field(default_factory=lambda: Path.cwd() / ".tidegate")
    dags: Path = field(default_factory=find_default_dags)
    pipelines: Path | None = None
    bucket: str = "tidegate"
    alerts: tuple[str, str] | None = None


NO_ALERTS = ("none", "")


@dataclass(frozen=True)
class StackStatus:
    """The state of a stack, as `tidegate up` prints it.

    Attributes:
        processes: name -> `running` or `stopped`.
        healthy: every process runs and every server reports that it is healthy.
        airflow_url: None for a stack that never ran.
        minio_endpoint: None for a stack that never ran.
        credentials_file: where the logins are.
    """

    processes: dict[str, str]
    healthy: bool
    airflow_url: str | None
    minio_endpoint: str | None
    credentials_file: Path


class Stack:
    """One local stack."""

    def __init__(self, settings: StackSettings | None = None) -> None:
        self.settings = settings or StackSettings()
        self.home = self.settings.home.absolute()
        self.credentials_file = self.home / "credentials.json"
        self._file = self.home / "stack.json"

    @property
    def was_up(self) -> bool:
        """Whether it was started before."""
        return self._file.exists()

    def up(self, progress: Progress) -> StackStatus:
        """Start the processes that do not run, and return when all are healthy.

        Builds MinIO if this machine has none, makes the bucket, and restarts an Airflow that runs
        with other settings.

        Raises:
            TransientError: a process ended or was not healthy in time; the message names its log.
            ConfigurationError: the DAGs folder does not exist, the variable of the alerts is not
                set, or the stack's files are damaged.
        """
        if not self.settings.dags.is_dir():
            raise NO_DAGS_FOLDER(folder=self.settings.dags)
        self._read_alert_secret()  # before anything starts
        say = add_times(progress)
        with lock_stack(self.home / "stack.lock"):
            self._note_alerts(say)
            self._start_minio(say)
            self._start_airflow(say)
        say(f"the stack is up: Airflow {self.airflow_url}, MinIO {self.minio_endpoint}")
        return self.status()

    def down(self, progress: Progress) -> None:
        """Stop all processes of this stack, streaming drivers included.

        Drivers have 20 s to seal what they have read; then they are killed. Data and addresses are
        kept.
        """
        say = add_times(progress)
        with lock_stack(self.home / "stack.lock"):
            state = self._state
            minio = state.processes.pop("minio", None)
            say("stopping Airflow")
            stop_processes(state.processes.values(), grace=15.0)
            # Only now: a supervising task would start its driver again. And before MinIO: a driver
            # seals what it has.
            known = {mark.pid for mark in (*state.processes.values(), *([minio] if minio else []))}
            ours = [
                mark
                for mark in find_processes_with("TIDEGATE_STACK_ID", state.stack_id)
                if mark.pid not in known
            ]
            # A JVM ends with its driver; if it ended first, the epoch would be lost.
            drivers = [mark for mark in ours if read_program_name(mark) != "java"]
            if drivers:
                say(f"stopping {len(drivers)} process(es) that Airflow had started")
                stop_processes(drivers, grace=_DRIVER_GRACE)
                kill_processes(ours)
            if minio:
                say("stopping MinIO")
                stop_processes([minio])
            state.processes = {}
            state.save(self._file)
        say("the stack is down; its data stays in " + str(self.home))

    def status(self) -> StackStatus:
        """Return which processes run, and whether all of the stack is healthy."""
        state = self._state
        names = ("minio", *airflow_processes.AIRFLOW_COMPONENTS)
        alive = {
            name: name in state.processes and is_process_alive(state.processes[name])
            for name in names
        }
        healthy = (
            all(alive.values())
            and self.minio_server().is_healthy()
            and not list_unhealthy_components(state.ports["airflow"])
        )
        return StackStatus(
            processes={name: "running" if runs else "stopped" for name, runs in alive.items()},
            healthy=healthy,
            airflow_url=self.airflow_url if "airflow" in state.ports else None,
            minio_endpoint=self.minio_endpoint if "minio" in state.ports else None,
            credentials_file=self.credentials_file,
        )

    @property
    def airflow_url(self) -> str:
        """The address of Airflow for a browser; ConfigurationError if the stack was never up."""
        return airflow_processes.build_airflow_url(self._read_port("airflow"))

    @property
    def minio_endpoint(self) -> str:
        """The address of MinIO for S3 clients; ConfigurationError if the stack was never up."""
        return f"http://127.0.0.1:{self._read_port('minio')}"

    @property
    def store_url(self) -> str:
        """The bucket as a store URL."""
        return f"s3://{self.settings.bucket}"

    def environment(self) -> dict[str, str]:
        """Return the variables with which a tidegate process finds this stack.

        They include the secret key of the bucket.

        Raises:
            ConfigurationError: the stack was never up.
        """
        app = self._secrets.minio_app
        pipelines = self.settings.pipelines or self.settings.dags / "pipelines"
        return {
            "TIDEGATE_HOME": str(self.home),
            "TIDEGATE_STORE": self.store_url,
            "TIDEGATE_S3_ENDPOINT": self.minio_endpoint,
            "TIDEGATE_S3_ACCESS_KEY": app.access_key,
            "TIDEGATE_S3_SECRET_KEY": app.secret_key,
            "TIDEGATE_S3_REGION": REGION,
            "TIDEGATE_PIPELINES": str(pipelines.absolute()),
        }

    def airflow_environment(self) -> dict[str, str]:
        """Return the settings of the Airflow processes, with those of `environment()`.

        They include the stack's id, which Airflow's children inherit; by it `down` finds drivers.
        It is not in `environment()`, so that a shell with those variables is never taken for a part
        of the stack.
        """
        dags = self.settings.dags.absolute()
        settings = airflow_processes.build_airflow_settings(
            self.home / "airflow", dags, self._read_port("airflow"), self._secrets
        )
        own = {"TIDEGATE_STACK_ID": self._state.stack_id, **self._build_alert_settings()}
        return settings | self.environment() | own

    def _find_alerts(self) -> tuple[str, str] | None:
        chosen = self.settings.alerts or self._state.alerts
        return None if chosen == NO_ALERTS else chosen

    def _note_alerts(self, say: Progress) -> None:
        state = self._state
        state.alerts = self._find_alerts()
        if self.settings.alerts is None and state.alerts is not None:
            receiver, variable = state.alerts
            say(f"alerts go to {receiver} (${variable}) as before; --alerts none ends that")
        state.save(self._file)

    def _build_alert_settings(self) -> dict[str, str]:
        found = self._find_alerts()
        if found is None:
            return {}
        receiver, variable = found
        alerts = {receiver: f"env:{variable}", "page": self.airflow_url}
        return {ALERTS_VARIABLE: json.dumps(alerts), variable: self._read_alert_secret()}

    def _read_alert_secret(self) -> str:
        found = self._find_alerts()
        if found is None:
            return ""
        receiver, variable = found
        if variable not in os.environ:
            raise NO_ALERT_VARIABLE(receiver=receiver, variable=variable)
        return os.environ[variable]

    def airflow_api(self, user: str = "admin") -> AirflowApi:
        """Return a client of Airflow's API for `admin`, `olga`, `uwe` or `vic`.

        It logs in with its first request. ConfigurationError if the stack was never up.
        """
        return AirflowApi(self.airflow_url, user, self._secrets.airflow_passwords[user])

    def minio_server(self) -> MinioServer:
        """Return the stack's MinIO, running or not.

        Set its `program` before you start it.
        """
        state = self._state
        return MinioServer(
            Path(),
            self.home / "minio-data",
            self.home / "logs" / "minio.log",
            root=self._secrets.minio_root,
            port=state.ports.get("minio", 0),
            mark=state.processes.get("minio"),
        )

    @property
    def _state(self) -> StackState:
        return StackState.load(self._file)

    @property
    def _secrets(self) -> StackSecrets:
        return StackSecrets.load_or_make(self.credentials_file)

    def _read_port(self, server: str) -> int:
        ports = self._state.ports
        if server not in ports:
            raise STACK_NEVER_UP(home=self.home)
        return ports[server]

    def _start_minio(self, say: Progress) -> None:
        state, server = self._state, self.minio_server()
        adopted = server.alive
        server.program = ensure_minio(say)
        # Noted before it is waited for: a killed `up` must not leave an unknown server behind.
        state.processes["minio"] = server.start_process()
        state.ports["minio"] = server.port
        state.save(self._file)
        server.wait_until_healthy()
        provision_bucket(server, self.settings.bucket, self._secrets.minio_app)
        say(
            f"MinIO {'runs already' if adopted else 'is up'} at {server.endpoint}, bucket"
            f" {self.settings.bucket}"
        )

    def _start_airflow(self, say: Progress) -> None:
        state = self._state
        # A running server keeps its port; a free one may be anybody's by now.
        server = state.processes.get("api-server")
        if server is None or not is_process_alive(server):
            state.ports["airflow"] = choose_free_port(state.ports.get("airflow", 0))
            state.save(self._file)
        write_private_json(
            airflow_processes.locate_passwords_file(self.home / "airflow"),
            self._secrets.airflow_passwords,
        )
        processes = AirflowProcesses(
            self.home, self.airflow_environment(), state, lambda: state.save(self._file), say
        )
        processes.restart_if_changed()
        processes.migrate_database()
        processes.start()
        processes.wait_until_healthy()
