"""Drivers by spark-submit, with the Spark provider's hook and connection: standalone (client mode), YARN, Kubernetes.

The hook builds the command line; the process is ours, detached like a local driver, because the hook's own call stays with it
until its end. In client mode that process is the driver. In cluster mode it is spark-submit, which waits for the driver: the
lease and the status in the bucket say how that one is, as for any driver on another host.

Secrets are never an argument: in client mode they stand in the environment of the process, in cluster mode in a properties
file that only its owner can read. What YARN and Kubernetes make of them there is theirs to hide; on Kubernetes prefer
`spark.kubernetes.driver.secretKeyRef.*`, in which case the connection of the store needs no keys.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.jobs.spec.loader import load_spec
from tidegate.jobs.spec.packages import add_connector_jars
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.operators.access import StoreAccess, build_child_environment
from tidegate.operators.launch import LaunchedDriver, make_driver_folder, make_attempt_name, start_detached

__all__ = ["SubmitLauncher"]

_APP_SOURCE: Final = 'import runpy\n\nrunpy.run_module("tidegate.jobs.driver", run_name="__main__")\n'
_DRIVER_ENV_PREFIXES: Final = {"yarn": "spark.yarn.appMasterEnv.", "k8s": "spark.kubernetes.driverEnv."}
_FORWARDED_VARIABLES: Final = ("TIDEGATE_STORE", "TIDEGATE_S3_", "TIDEGATE_SPARK_JARS", "AWS_", "OTEL_", "OPENLINEAGE_")
_UPLOAD_SETTING: Final = "spark.kubernetes.file.upload.path"


class SubmitLauncher:
    """Starts a driver by `spark-submit`.

    Args:
        conn_id: Airflow connection of the Spark provider: master, deploy mode, queue, namespace.
        py_files: what Python needs on the other side, usually tidegate's wheel; none where it is installed.
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
        self._conn_id, self._py_files, self._conf, self._folder = conn_id, tuple(py_files), dict(conf or {}), folder

    def launch(self, pipeline: str, spec: str, access: StoreAccess, recover_to: str) -> LaunchedDriver:
        """Submit the driver and return at once."""
        attempt = make_attempt_name()
        folder = make_driver_folder(pipeline, self._folder)
        environment = build_child_environment(access)
        command = self.build_command(spec, access, recover_to, folder / attempt, environment)
        if "--properties-file" not in command:  # else Python is elsewhere as well
            environment = {"PYSPARK_PYTHON": sys.executable, **environment}
        return start_detached(folder, attempt, command, environment)

    def build_command(self, spec: str, access: StoreAccess, recover_to: str, stem: Path, environment: Mapping[str, str]) -> list[str]:
        """The command line; what it needs beside it is written to `stem` with other endings."""
        pipeline = load_spec(spec)
        hook = self._make_hook(pipeline)
        found: dict[str, Any] = hook._resolve_connection()
        away = found["deploy_mode"] == "cluster"
        kind = next((kind for kind in _DRIVER_ENV_PREFIXES if found["master"].startswith(kind)), None)
        if away and kind is None:
            raise ConfigurationError(
                f"{found['master']} with deploy mode cluster: a standalone master takes no Python driver",
                code="airflow.submit_mode",
                advice=f"set deploy-mode to client in the extra of the connection {self._conn_id!r}",
            )
        if kind == "k8s" and away and _UPLOAD_SETTING not in {**pipeline.spark.conf, **self._conf}:
            raise ConfigurationError(
                f"{pipeline.name}: in cluster mode Kubernetes' drivers fetch their program from a place that {_UPLOAD_SETTING} names",
                code="airflow.submit_upload",
                advice="set it in supervision.submit.conf, and spark.kubernetes.container.image (docs/production.md, Clusters)",
            )
        app = stem.with_suffix(".app.py")
        app.write_text(_APP_SOURCE, encoding="utf-8")
        path = Path(spec).absolute()
        # In cluster mode the spec travels along and lies in the driver's working folder.
        own: dict[str, Any] = {}
        if away and kind:
            own = {"files": str(path), "properties_file": _write_private_properties(stem, kind, _select_driver_environment(pipeline, environment))}
        arguments = [path.name if away else str(path), "--store", access.url, "--recover-to", recover_to]
        built = self._make_hook(pipeline, application_args=arguments, **own)._build_spark_submit_command(str(app))
        # The site's own defaults count as well: a properties file would replace them.
        return [_find_program(built[0]), *(["--load-spark-defaults"] if own else []), *built[1:]]

    def _make_hook(self, pipeline: PipelineSpec, **more: Any) -> Any:
        # Here, not above: the hook takes a second to import, and the factory is imported at every parse.
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
        except (NameError, RuntimeError) as error:  # what the hook says to a k8s:// master without that package
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
        output.writelines(f"{_DRIVER_ENV_PREFIXES[kind]}{name} {_escape_property(value)}\n" for name, value in environment.items())
    return str(file)


def _select_driver_environment(pipeline: PipelineSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """What the driver needs of an environment: our settings, and what the spec writes as `env:NAME`."""
    named = set(re.findall(r'"env:([^"]+)"', pipeline.canonical_json()))
    return {name: value for name, value in environment.items() if name in named or name.startswith(_FORWARDED_VARIABLES)}


def _escape_property(value: str) -> str:
    """A value as Java's properties take it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n")


def _find_program(name: str) -> str:
    """Beside this Python, on PATH, or inside the pyspark that this Python would import."""
    spark = find_spec("pyspark")
    inside = [f"{place}/bin" for place in (spark.submodule_search_locations or [])] if spark else []
    places = [str(Path(sys.executable).parent), *os.environ.get("PATH", os.defpath).split(os.pathsep), *inside]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise ConfigurationError(
            f"there is no {name} on this worker",
            code="airflow.no_spark_submit",
            advice="install Spark, or pyspark beside Airflow",
        )
    return found
