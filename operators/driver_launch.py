"""Start a driver that outlives its task, and identify it so that it is found again.

The driver runs in its own session under a tiny shell that writes down its exit code, because no
process waits for it once the task has ended.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from pydantic.dataclasses import dataclass

from tidegate.checkpoints.driver_reports import make_attempt_name
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.loader import load_any_spec
from tidegate.jobs.spec.operations import SubmitSpec
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import JsonObject

from .store_access import StoreAccess, build_child_environment, get_tidegate_home

# The shell must survive a SIGTERM sent to the whole group, or the exit code is lost; `:` instead of
# '' because an ignored signal would stay ignored in the driver.
# spark-submit reads its properties file, which holds keys, once at its start; it waits for the end
# of the application, so the file goes after a while or at the end, whichever is first.
_EXIT_CODE_SHELL = (
    'keys="${0%.exit}.conf"; [ ! -e "$keys" ] || { sleep 300; rm -f "$keys"; } & '
    'trap : TERM INT HUP; "$@"; code=$?; rm -f "$keys"; '
    'echo "$code" > "$0.part" && mv "$0.part" "$0"'
)
# Attempts of one pipeline whose files stay on this host. The bucket keeps the newest logs as well.
KEPT_ATTEMPTS = 50
# Twice the time after which the shell itself deletes the keys.
_FOREIGN_START_SECONDS = 600.0


@dataclass(frozen=True)
class LaunchedDriver:
    """One started driver. Deferred triggers carry these fields, as `as_dict` returns them.

    Attributes:
        attempt: unique name of this start.
        log: where its output goes.
        leader: the leader of its process group; the driver itself is the leader's child.
        exit_file: appears with the exit code when the driver has ended.
    """

    attempt: str
    log: str
    leader: ProcessIdentity
    exit_file: str

    def read_exit_code(self) -> int | None:
        """Return the driver's exit code.

        None while it runs, if it was killed together with its group, or on another host.
        """
        try:
            return int(Path(self.exit_file).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def runs(self, process: ProcessIdentity | None) -> bool:
        """Whether a process of this host belongs to this start."""
        if process is None or not is_on_this_host(process):
            return False
        with suppress(ProcessLookupError):
            return os.getpgid(process.pid) == self.leader.pid
        return False

    def is_alive(self) -> bool:
        """Whether the driver may still run. Never False without proof."""
        return self.read_exit_code() is None and not self.leader.is_proven_dead()

    def as_dict(self) -> JsonObject:
        """Return JSON-ready data, for triggers."""
        return {**asdict(self), "leader": self.leader.model_dump()}


def launch_driver(
    pipeline: str,
    spec: str,
    access: StoreAccess,
    recover_to: str,
    *,
    submit: SubmitSpec | None = None,
    standby: bool = False,
) -> LaunchedDriver:
    """Start one driver in its own process group and return at once; a task calls this.

    Its command is `$TIDEGATE_DRIVER`, else the driver of pipelines or that of jobs in this Python.
    With `submit`, it is spark-submit through the Spark provider's hook. The hook waits for the end
    of spark-submit, so it runs in a detached process of its own (`spark_submission`). In client
    mode the driver runs below it; in cluster mode lease and report in the bucket show how the
    driver is, as for any driver on another host.

    Args:
        pipeline: its name.
        spec: path of its YAML file.
        access: address of its store.
        recover_to: `latest`, `latest_healthy` or a checkpoint id.
        submit: `supervision.submit` of the spec; its connection also has queue and namespace.
        standby: wait while another driver holds the lease; end if the pipeline is stopped.
    """
    attempt, folder = make_attempt_name(), make_driver_folder(pipeline)
    arguments = [str(Path(spec).absolute()), "--store", access.url, "--recover-to", recover_to]
    arguments += ["--standby", "--ends-when-stopped"] if standby else []
    # Secrets travel in the environment alone.
    environment = build_child_environment(access)
    if submit is None:
        command = shlex.split(os.environ.get("TIDEGATE_DRIVER", ""))
        command = command or [sys.executable, "-m", _find_driver_module(spec)]
    else:
        from airflow.sdk import Connection

        options = [str(folder / attempt), submit.model_dump_json()]
        command = [sys.executable, "-m", "tidegate.operators.spark_submission", *options]
        # Only a task can read Airflow's connections, so the connection travels with it.
        connection = Connection.get(submit.conn_id).as_json()
        environment[f"AIRFLOW_CONN_{submit.conn_id.upper()}"] = connection
        if "AIRFLOW_HOME" in os.environ:
            environment["AIRFLOW_HOME"] = os.environ["AIRFLOW_HOME"]
    return start_detached(folder, attempt, [*command, *arguments], environment)


def _find_driver_module(path: str) -> str:
    """Return the program that runs a spec. A broken spec is reported by the driver, in its log."""
    with suppress(ConfigurationError):
        return choose_driver_module(load_any_spec(path))
    return choose_driver_module(None)


def choose_driver_module(spec: PipelineSpec | JobSpec | None) -> str:
    """Return the program that drives a pipeline or a job."""
    return f"tidegate.jobs.{'sealed_queries' if isinstance(spec, JobSpec) else 'driver'}"


def make_driver_folder(pipeline: str) -> Path:
    """Return the folder of the logs and exit codes of a pipeline's drivers; make it if needed.

    It lies in `$TIDEGATE_HOME/drivers`. Only this user may look into it, because logs quote rows.
    """
    folder = get_tidegate_home() / "drivers" / pipeline
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def start_detached(
    folder: Path, attempt: str, command: Sequence[str], environment: Mapping[str, str]
) -> LaunchedDriver:
    """Start a command in a process group that outlives this process.

    `folder` gets its output, its exit code and a launch record, all named after the attempt. Files
    of old attempts there are deleted (`delete_old_attempts`).
    """
    log, exit_file = folder / f"{attempt}.log", folder / f"{attempt}.exit"
    with log.open("ab") as output:
        child = subprocess.Popen(
            ["/bin/sh", "-c", _EXIT_CODE_SHELL, str(exit_file), *command],
            # The task's own pipes would break when the task ends.
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            # The driver sends its log to the bucket while it runs; jobs/driver/log_output.py reads
            # these variables.
            env={**environment, "TIDEGATE_DRIVER_LOG": str(log), "TIDEGATE_ATTEMPT": attempt},
            # Airflow kills the process group of a task; the driver has to outlive it.
            start_new_session=True,
        )
    # Nothing waits for the child, because it outlives this process; Popen would warn about that.
    child.returncode = 0
    leader = ProcessIdentity.of_process(child.pid, attempt)
    launched = LaunchedDriver(attempt, str(log), leader, str(exit_file))
    (folder / f"{attempt}.json").write_text(json.dumps(launched.as_dict()), encoding="utf-8")
    # After the record: the new attempt counts as one of those that are kept.
    delete_old_attempts(folder)
    return launched


def read_launch_record(path: Path) -> LaunchedDriver | None:
    """Read what `start_detached` noted; None if the file is half written or not such a record."""
    with suppress(OSError, ValueError, TypeError):
        return LaunchedDriver(**json.loads(path.read_text("utf-8")))
    return None


def find_standby(
    folder: Path, holder: ProcessIdentity | None, ended: LaunchedDriver | None = None
) -> LaunchedDriver | None:
    """Return the newest driver of a folder that runs on this host and does not hold the lease.

    None if there is none.

    Args:
        folder: of the pipeline's launch records.
        holder: the process that holds the lease; None if it is free.
        ended: a driver that was just killed, and may not be gone yet.
    """
    for record in sorted(folder.glob("*.json"), reverse=True):
        launched = read_launch_record(record)
        if (
            launched is not None
            and launched != ended
            and is_on_this_host(launched.leader)
            and launched.is_alive()
            and not launched.runs(holder)
        ):
            return launched
    return None


def delete_old_attempts(folder: Path, keep: int = KEPT_ATTEMPTS) -> None:
    """Delete the files of all but the newest `keep` attempts, except of drivers that run here.

    A driver on another host counts as running for ten minutes, because its spark-submit may still
    have to read its keys. Of every attempt that has ended, the file with its keys is deleted.
    """
    records = sorted(folder.glob("*.json"))  # names begin with the time of the start
    for number, record in enumerate(records):
        launched = read_launch_record(record)
        if launched is not None and is_on_this_host(launched.leader):
            ended = not launched.is_alive()
        else:
            ended = _is_older_than(record, _FOREIGN_START_SECONDS)
        if ended:
            # Of a driver that was killed with its shell, the file with the keys is still there.
            old = number < len(records) - keep
            for file in folder.glob(f"{record.stem}.*" if old else f"{record.stem}.conf"):
                file.unlink(missing_ok=True)


def _is_older_than(file: Path, seconds: float) -> bool:
    try:
        return time.time() - file.stat().st_mtime > seconds
    except FileNotFoundError:  # another host has deleted it
        return False


def is_on_this_host(process: ProcessIdentity) -> bool:
    """Whether the process belongs to this host, boot and pid namespace.

    Otherwise its pid may be that of another process here.
    """
    here, there = (
        (identity.host, identity.boot, identity.namespace)
        for identity in (ProcessIdentity.this_process(), process)
    )
    return here == there and bool(process.boot)


def send_signal(process: ProcessIdentity, number: signal.Signals, *, group: bool = False) -> bool:
    """Signal exactly this process, or the group it belongs to.

    Returns False if it is not on this host, has ended, or belongs to another user.
    """
    if not is_on_this_host(process) or process.is_proven_dead():
        return False
    with suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(os.getpgid(process.pid), number)
        else:
            os.kill(process.pid, number)
        return True
    return False


def has_own_session(process: ProcessIdentity) -> bool:
    """Whether a process of this host was started in a session of its own, as `start_detached` does.

    Its group then holds the driver and its JVM, and nothing else.
    """
    with suppress(ProcessLookupError):
        return os.getsid(process.pid) == os.getpgid(process.pid) != os.getpgid(0)
    return False


def tail_log_file(log: str, lines: int = 20, max_bytes: int = 16_384) -> list[str]:
    """Return the last lines of a log, reading at most its last `max_bytes`.

    Empty if the file is not on this host.
    """
    try:
        with Path(log).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - max_bytes))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
