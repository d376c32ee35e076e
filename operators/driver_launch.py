"""Start a driver that outlives the task, and name it so that it can be found again and never be mistaken for another.

The driver runs in a session of its own under a tiny shell that writes down its exit code: nobody is
left to `wait` for it once the task has ended.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from tidegate.checkpoints.process_identity import ProcessIdentity
from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.loader import load_spec
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.spark_packages import add_connector_jars
from tidegate.operators.store_access import StoreAccess, build_child_environment, get_tidegate_home

# The shell must survive a SIGTERM sent to the whole group, or the exit code is lost; `:` instead of
# '' because an ignored signal would stay ignored in the driver.
_EXIT_CODE_SHELL = (
    'trap : TERM INT HUP; "$@"; code=$?; echo "$code" > "$0.part" && mv "$0.part" "$0"'
)


@dataclass(frozen=True)
class LaunchedDriver:
    """One started driver.

    Attributes:
        attempt: unique name of this start.
        log: where its output goes.
        leader: the process group's leader, identified for ever; the driver itself is its child.
        exit_file: appears with the exit code when the driver has ended.
    """

    attempt: str
    log: str
    leader: ProcessIdentity
    exit_file: str

    def read_exit_code(self) -> int | None:
        """The driver's exit code.

        None while it runs, or when it was killed together with its group.
        """
        try:
            return int(Path(self.exit_file).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def is_alive(self) -> bool:
        """Whether the driver may still run. Never False without proof."""
        return self.read_exit_code() is None and not self.leader.is_proven_dead()

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, for triggers."""
        return {**asdict(self), "leader": self.leader.model_dump()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LaunchedDriver:
        """Inverse of `as_dict`."""
        return cls(**{**data, "leader": ProcessIdentity.model_validate(data["leader"])})


class Launcher(Protocol):
    """Starts a driver and returns at once; called by a task, on its worker."""

    def launch(
        self, pipeline: str, spec: str, access: StoreAccess, recover_to: str
    ) -> LaunchedDriver:
        """Start one driver process for the pipeline."""
        ...


class LocalLauncher:
    """Starts the driver on this host, as a process group of its own.

    Args:
        folder: of logs and exit codes; default `$TIDEGATE_HOME/drivers`.
        command: what to run; default `$TIDEGATE_DRIVER`, else `python -m tidegate.jobs.driver` of
            this Python.
    """

    def __init__(self, folder: Path | None = None, command: list[str] | None = None) -> None:
        self._folder = folder
        own = shlex.split(os.environ.get("TIDEGATE_DRIVER", ""))
        self._command = command or own or [sys.executable, "-m", "tidegate.jobs.driver"]

    def launch(
        self, pipeline: str, spec: str, access: StoreAccess, recover_to: str
    ) -> LaunchedDriver:
        """Start the driver; secrets travel in its environment only."""
        attempt = make_attempt_name()
        driver = [
            *self._command,
            str(Path(spec).absolute()),
            "--store",
            access.url,
            "--recover-to",
            recover_to,
        ]
        return start_detached(
            make_driver_folder(pipeline, self._folder),
            attempt,
            driver,
            build_child_environment(access),
        )


def make_launcher(submit: Mapping[str, Any] | None) -> Launcher:
    """The launcher a spec asks for.

    `supervision.submit` by spark-submit, else a process of its own on this host.
    """
    if submit is None:
        return LocalLauncher()

    return SubmitLauncher(**submit)


def make_attempt_name() -> str:
    """A unique name for a start; names sort by time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


def make_driver_folder(pipeline: str, folder: Path | None = None) -> Path:
    """Where the logs and exit codes of a pipeline's drivers lie."""
    found = (folder or get_tidegate_home() / "drivers") / pipeline
    found.mkdir(parents=True, exist_ok=True)
    return found


def start_detached(
    folder: Path, attempt: str, command: Sequence[str], environment: Mapping[str, str]
) -> LaunchedDriver:
    """Start a command as a process group that outlives us, its output in a log, its exit code in a file."""
    log, exit_file = folder / f"{attempt}.log", folder / f"{attempt}.exit"
    with log.open("ab") as output:
        child = subprocess.Popen(
            ["/bin/sh", "-c", _EXIT_CODE_SHELL, str(exit_file), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            # The driver sends its log to the bucket while it runs; jobs/driver/log_output.py reads
            # these.
            env={**environment, "TIDEGATE_DRIVER_LOG": str(log), "TIDEGATE_ATTEMPT": attempt},
            start_new_session=True,
        )
    child.returncode = (
        0  # never waited for: it is meant to outlive us, and Popen would warn about that
    )
    launched = LaunchedDriver(
        attempt, str(log), _identify_process(child.pid, attempt), str(exit_file)
    )
    (folder / f"{attempt}.json").write_text(json.dumps(launched.as_dict()), encoding="utf-8")
    return launched


def is_on_this_host(holder: ProcessIdentity) -> bool:
    """Whether the process belongs to this host, this boot and this pid namespace.

    Only then its pid means anything.
    """
    me = ProcessIdentity.this_process()
    return (holder.host, holder.boot, holder.namespace) == (
        me.host,
        me.boot,
        me.namespace,
    ) and bool(me.boot)


def send_signal(holder: ProcessIdentity, number: signal.Signals, *, group: bool = False) -> bool:
    """Signal exactly this process (or the group it belongs to).

    False when it is not here or no longer itself.
    """
    if not is_on_this_host(holder) or holder.is_proven_dead():
        return False
    with suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(os.getpgid(holder.pid), number)
        else:
            os.kill(holder.pid, number)
        return True
    return False


def tail_log_file(log: str, lines: int = 20, most_bytes: int = 16_384) -> list[str]:
    """The last lines of a log, reading at most the end of it."""
    try:
        with Path(log).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - most_bytes))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def _identify_process(pid: int, driver: str) -> ProcessIdentity:
    # The second field of stat is the command in parentheses and may hold anything, also
    # parentheses.
    fields = (
        Path(f"/proc/{pid}/stat")
        .read_text(encoding="utf-8", errors="replace")
        .rpartition(")")[2]
        .split()
    )
    return ProcessIdentity.this_process(driver).model_copy(
        update={"pid": pid, "start_ticks": int(fields[19])}
    )


# Drivers by spark-submit, with the Spark provider's hook and connection: standalone (client mode),
# YARN, Kubernetes.
#
# The hook builds the command line; the process is ours, detached like a local driver, because the
# hook's own call stays with it until its end. In client mode that process is the driver. In cluster
# mode it is spark-submit, which waits for the driver: the lease and the status in the bucket say
# how that one is, as for any driver on another host.
#
# Secrets are never an argument: in client mode they stand in the environment of the process, in
# cluster mode in a properties file that only its owner can read. What YARN and Kubernetes make of
# them there is theirs to hide; on Kubernetes prefer `spark.kubernetes.driver.secretKeyRef.*`, in
# which case the connection of the store needs no keys.

_APP_SOURCE: Final = (
    'import runpy\n\nrunpy.run_module("tidegate.jobs.driver", run_name="__main__")\n'
)
_DRIVER_ENV_PREFIXES: Final = {
    "yarn": "spark.yarn.appMasterEnv.",
    "k8s": "spark.kubernetes.driverEnv.",
}
_FORWARDED_VARIABLES: Final = (
    "TIDEGATE_STORE",
    "TIDEGATE_S3_",
    "TIDEGATE_SPARK_JARS",
    "AWS_",
    "OTEL_",
    "OPENLINEAGE_",
)
_UPLOAD_SETTING: Final = "spark.kubernetes.file.upload.path"


class SubmitLauncher:
    """Starts a driver by `spark-submit`.

    Args:
        conn_id: Airflow connection of the Spark provider: master, deploy mode, queue, namespace.
        py_files: what Python needs on the other side, usually tidegate's wheel; none where it is
            installed.
        conf: Spark settings, beyond the spec's.
        folder: of logs and exit codes; default `$TIDEGATE_HOME/drivers`.
    """

    def __init__(
        self,
        conn_id: str = "spark_default",
        py_files: Sequence[str] = (),
        conf: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._conn_id, self._py_files, self._conf, self._folder = (
            conn_id,
            tuple(py_files),
            dict(conf or {}),
            folder,
        )

    def launch(
        self, pipeline: str, spec: str, access: StoreAccess, recover_to: str
    ) -> LaunchedDriver:
        """Submit the driver and return at once."""
        attempt = make_attempt_name()
        folder = make_driver_folder(pipeline, self._folder)
        environment = build_child_environment(access)
        command = self.build_command(spec, access, recover_to, folder / attempt, environment)
        if "--properties-file" not in command:  # else Python is elsewhere as well
            environment = {"PYSPARK_PYTHON": sys.executable, **environment}
        return start_detached(folder, attempt, command, environment)

    def build_command(
        self,
        spec: str,
        access: StoreAccess,
        recover_to: str,
        stem: Path,
        environment: Mapping[str, str],
    ) -> list[str]:
        """The command line; what it needs beside it is written to `stem` with other endings."""
        pipeline = load_spec(spec)
        hook = self._make_hook(pipeline)
        found: dict[str, Any] = hook._resolve_connection()
        away = found["deploy_mode"] == "cluster"
        kind = next(
            (kind for kind in _DRIVER_ENV_PREFIXES if found["master"].startswith(kind)), None
        )
        if away and kind is None:
            raise ConfigurationError(
                f"{found['master']} with deploy mode cluster: a standalone master takes no Python"
                " driver",
                code="airflow.submit_mode",
                advice=(
                    f"set deploy-mode to client in the extra of the connection {self._conn_id!r}"
                ),
            )
        if kind == "k8s" and away and _UPLOAD_SETTING not in {**pipeline.spark.conf, **self._conf}:
            raise ConfigurationError(
                f"{pipeline.name}: in cluster mode Kubernetes' drivers fetch their program from a"
                f" place that {_UPLOAD_SETTING} names",
                code="airflow.submit_upload",
                advice=(
                    "set it in supervision.submit.conf, and spark.kubernetes.container.image"
                    " (docs/clusters.md, Clusters)"
                ),
            )
        app = stem.with_suffix(".app.py")
        app.write_text(_APP_SOURCE, encoding="utf-8")
        path = Path(spec).absolute()
        # In cluster mode the spec travels along and lies in the driver's working folder.
        own: dict[str, Any] = {}
        if away and kind:
            own = {
                "files": str(path),
                "properties_file": _write_private_properties(
                    stem, kind, _select_driver_environment(pipeline, environment)
                ),
            }
        arguments = [
            path.name if away else str(path),
            "--store",
            access.url,
            "--recover-to",
            recover_to,
        ]
        built = self._make_hook(
            pipeline, application_args=arguments, **own
        )._build_spark_submit_command(str(app))
        # The site's own defaults count as well: a properties file would replace them.
        return [_find_program(built[0]), *(["--load-spark-defaults"] if own else []), *built[1:]]

    def _make_hook(self, pipeline: PipelineSpec, **more: Any) -> Any:
        # Here, not above: the hook takes a second to import, and the factory is imported at every
        # parse.
        from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

        try:
            return SparkSubmitHook(
                conn_id=self._conn_id,
                conf={**add_connector_jars(pipeline).conf, **self._conf},
                py_files=",".join(self._py_files) or None,
                name=f"tidegate-{pipeline.name}",
                driver_memory=pipeline.spark.driver_memory,
                **more,
            )
        except (
            NameError,
            RuntimeError,
        ) as error:  # what the hook says to a k8s:// master without that package
            raise ConfigurationError(
                f"spark-submit to Kubernetes needs a package that is not here: {error}",
                code="airflow.no_kubernetes",
                advice="install apache-airflow-providers-cncf-kubernetes beside Airflow",
            ) from error


def _write_private_properties(stem: Path, kind: str, environment: Mapping[str, str]) -> str:
    """A properties file with the driver's environment, for its owner's eyes only."""
    file = stem.with_suffix(".conf")
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as output:
        output.writelines(
            f"{_DRIVER_ENV_PREFIXES[kind]}{name} {_escape_property(value)}\n"
            for name, value in environment.items()
        )
    return str(file)


def _select_driver_environment(
    pipeline: PipelineSpec, environment: Mapping[str, str]
) -> dict[str, str]:
    """What the driver needs of an environment.

    Our settings, and what the spec writes as `env:NAME`.
    """
    named = set(re.findall(r'"env:([^"]+)"', pipeline.canonical_json()))
    return {
        name: value
        for name, value in environment.items()
        if name in named or name.startswith(_FORWARDED_VARIABLES)
    }


def _escape_property(value: str) -> str:
    """A value as Java's properties take it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n")


def _find_program(name: str) -> str:
    """Beside this Python, on PATH, or inside the pyspark that this Python would import."""
    spark = find_spec("pyspark")
    inside = [f"{place}/bin" for place in spark.submodule_search_locations or []] if spark else []
    places = [
        str(Path(sys.executable).parent),
        *os.environ.get("PATH", os.defpath).split(os.pathsep),
        *inside,
    ]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise ConfigurationError(
            f"there is no {name} on this worker",
            code="airflow.no_spark_submit",
            advice="install Spark, or pyspark beside Airflow",
        )
    return found
