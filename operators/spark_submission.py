"""``python -m tidegate.operators.spark_submission``: submit a driver by the Spark provider's hook.

A task starts this detached and then sleeps. `SparkSubmitHook.submit` returns when spark-submit
ends, so this process lives as long: in client mode that is the driver's life, in cluster mode
spark-submit waits for the driver. Its exit code is that of spark-submit, which in client mode is
the driver's.

Secrets are never an argument: in client mode they are in the environment of the process, in cluster
mode in a properties file that only its owner can read. YARN and Kubernetes may show them to others
there; on Kubernetes prefer `spark.kubernetes.driver.secretKeyRef.*`, in which case the connection
of the store needs no keys.
"""

import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tidegate.errors import FailureClass, TidegateError
from tidegate.jobs.spec.executor_memory import build_container_settings
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.loader import load_any_spec, render_spec
from tidegate.jobs.spec.operations import (
    SparkSpec,
    SubmitSpec,
    add_bucket_jars,
    add_connector_jars,
)
from tidegate.jobs.spec.pipeline import PipelineSpec

from .driver_launch import choose_driver_module
from .errors import JOB_IN_CLUSTER, NO_KUBERNETES, NO_SPARK_SUBMIT, SUBMIT_MODE, SUBMIT_UPLOAD
from .store_access import StoreAccess, build_child_environment

_APP_SOURCE = 'import runpy\n\nrunpy.run_module("{module}", run_name="__main__")\n'
_DRIVER_ENV_PREFIXES = {
    "yarn": "spark.yarn.appMasterEnv.",
    "k8s": "spark.kubernetes.driverEnv.",
}
_FORWARDED_VARIABLES = (
    "TIDEGATE_STORE",
    "TIDEGATE_S3_",
    "TIDEGATE_SPARK_JARS",
    "AWS_",
    "OTEL_",
    "OPENLINEAGE_",
)
_JVM_OPTIONS = "spark.driver.extraJavaOptions"
# With a local master, no other host has to reach the driver.
_LOOPBACK = dict.fromkeys(("spark.driver.host", "spark.driver.bindAddress"), "127.0.0.1")
_UPLOAD_SETTING = "spark.kubernetes.file.upload.path"


def main(arguments: list[str]) -> int:
    """Submit, and wait; returns the exit code of spark-submit, or that of the error's class.

    Args:
        arguments: path without its ending for the files of this attempt, `SubmitSpec` as JSON, path
            of the pipeline's spec, arguments of the driver.
    """
    stem, submit, spec, *driver_arguments = arguments
    # The driver drains when its process group is asked to end, and this process waits for it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        options = SubmitSpec.model_validate_json(submit)
        return submit_driver(Path(stem), options, Path(spec), driver_arguments)
    except TidegateError as error:
        print(error, flush=True)  # noqa: T201 - the driver's log
        return error.failure_class.exit_code
    except Exception:
        # Python's own exit code after an exception would mean a fault of the data.
        traceback.print_exc()
        return FailureClass.TRANSIENT.exit_code


def submit_driver(stem: Path, options: SubmitSpec, spec: Path, driver_arguments: list[str]) -> int:
    """Submit a driver and wait for spark-submit; returns its exit code, on Kubernetes the driver's.

    Args:
        stem: path without its ending for the application and the properties file.
        options: connection, packages and settings.
        spec: of the pipeline or job.
        driver_arguments: of the driver, after the spec.

    Raises:
        ConfigurationError: connection, settings or programs do not allow it.
        AirflowException: spark-submit failed without an exit code.
    """
    # Without this variable, importing Airflow's hook prepares its database as well.
    os.environ.setdefault("_AIRFLOW__AS_LIBRARY", "1")
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
    from airflow.sdk.exceptions import AirflowException

    driven = load_any_spec(spec)
    connection = SparkSubmitHook.get_connection(options.conn_id)
    cluster = find_cluster_kind(connection, driven, options)
    environment = build_child_environment(StoreAccess(os.environ["TIDEGATE_STORE"]))
    settings = _build_spark_settings(driven)
    conf = {**settings.conf, **options.conf}
    if isinstance(driven, PipelineSpec):  # how much a job's own functions need is not known
        conf = {**build_container_settings(_find_master(connection), conf), **conf}
    more: dict[str, Any] = {"application_args": [str(spec), *driver_arguments]}
    if cluster is None:
        # The driver runs here, in the JVM that spark-submit starts, on this Python.
        environment = {"PYSPARK_PYTHON": sys.executable, **environment}
        jvm_options = filter(None, (settings.jvm_options, conf.get(_JVM_OPTIONS)))
        here = _LOOPBACK if str(connection.host).startswith("local") else {}
        conf = {**here, **conf, _JVM_OPTIONS: " ".join(jvm_options)}
    else:
        # In cluster mode the spec travels along and lies in the driver's working folder. Its
        # environment is part of it: the files beside it stay here.
        copy = stem.with_name(f"{stem.name}.{spec.name}")
        copy.write_text(render_spec(spec), "utf-8")
        more = {
            "application_args": [copy.name, *driver_arguments],
            "files": str(copy),
            "properties_file": _write_private_properties(stem, cluster, driven, environment),
        }
    app = stem.with_suffix(".app.py")
    app.write_text(_APP_SOURCE.format(module=choose_driver_module(driven)), "utf-8")
    environment["PATH"] = _list_program_folders(environment)
    try:
        hook = SparkSubmitHook(
            conn_id=options.conn_id,
            conf={name: value for name, value in conf.items() if value},
            py_files=",".join(options.py_files) or None,
            name=f"tidegate-{driven.name}",
            driver_memory=settings.driver_memory,
            **more,
        )
    except (NameError, RuntimeError) as error:
        # The hook raises these for a k8s:// master if Kubernetes' client is missing.
        raise NO_KUBERNETES(error=error) from error
    if shutil.which(str(hook.spark_binary), path=environment["PATH"]) is None:
        raise NO_SPARK_SUBMIT(program=hook.spark_binary)
    _print_log_lines_only()
    try:
        hook.submit(str(app), env=environment)
    except AirflowException as error:
        # The code of spark-submit, and on Kubernetes also that of the driver's pod.
        codes = re.findall(r" code is: (\d+)", str(error).partition("\n")[0])
        if not codes:
            raise
        return int(codes[-1]) or FailureClass.TRANSIENT.exit_code
    return 0


def _build_spark_settings(driven: PipelineSpec | JobSpec) -> SparkSpec:
    """Memory, JVM options and settings of the driver, with the jars that it needs."""
    if isinstance(driven, PipelineSpec):
        return add_connector_jars(driven)
    jars = add_bucket_jars(driven.conf) if driven.checkpoint.location == "bucket" else {}
    memory = driven.conf.get("spark.driver.memory", "1g")  # Spark's own default
    # What comes from the environment, the driver sets when the script makes its session.
    shown = {key: text for key, text in driven.conf.items() if not text.startswith("env:")}
    # Spark SQL evaluates the rows of a job, often in the JVM of its driver.
    return SparkSpec(driver_memory=memory, jvm="throughput", conf={**shown, **jars})


def find_cluster_kind(
    connection: Any, driven: PipelineSpec | JobSpec, options: SubmitSpec
) -> str | None:
    """Return `yarn` or `k8s` in cluster mode; None in client mode.

    Raises:
        ConfigurationError: the master takes no driver in cluster mode, a setting for it is missing,
            or the driver is that of a job.
    """
    if connection.extra_dejson.get("deploy-mode") != "cluster":
        return None
    if isinstance(driven, JobSpec):
        raise JOB_IN_CLUSTER(pipeline=driven.name, conn_id=options.conn_id)
    master = _find_master(connection)
    kind = next((kind for kind in _DRIVER_ENV_PREFIXES if master.startswith(kind)), None)
    if kind is None:
        raise SUBMIT_MODE(master=master, conn_id=options.conn_id)
    if kind == "k8s" and _UPLOAD_SETTING not in {**driven.spark.conf, **options.conf}:
        raise SUBMIT_UPLOAD(pipeline=driven.name, setting=_UPLOAD_SETTING)
    return kind


def _find_master(connection: Any) -> str:
    # A connection made in Airflow's UI has the type `spark` and the master as its host.
    return str(connection.host if connection.conn_type == "spark" else connection.conn_type)


def _print_log_lines_only() -> None:
    """Have the hook's log, which is spark-submit's output, written as it is: JSON lines."""
    import structlog

    structlog.configure(
        processors=[lambda _logger, _method, event: str(event["event"])],
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
    )


def _write_private_properties(
    stem: Path, cluster: str, driven: PipelineSpec | JobSpec, environment: Mapping[str, str]
) -> str:
    """Write a properties file with the driver's environment, readable by its owner only.

    Spark reads this file instead of the site's defaults, so that it begins with them.
    """
    home = environment.get("SPARK_HOME") or next(iter(_list_pyspark_folders()), "")
    folder = environment.get("SPARK_CONF_DIR") or Path(home, "conf")
    file, defaults = stem.with_suffix(".conf"), Path(folder, "spark-defaults.conf")
    # tidegate's variables, and what the spec names as `env:NAME`.
    named = set(re.findall(r'"env:([^"]+)"|\$\{(\w+)', driven.model_dump_json()))
    names = {name for pair in named for name in pair}
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as output:
        if defaults.is_file():
            output.write(defaults.read_text("utf-8") + "\n")
        for name, value in environment.items():
            if name in names or name.startswith(_FORWARDED_VARIABLES):
                # As Java's properties take it.
                escaped = value.replace("\\", "\\\\").replace("\n", "\\n")
                output.write(f"{_DRIVER_ENV_PREFIXES[cluster]}{name} {escaped}\n")
    return str(file)


def _list_program_folders(environment: Mapping[str, str]) -> str:
    """Where spark-submit may be: next to this Python, on PATH, inside the installed pyspark."""
    folders = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    return os.pathsep.join([*folders, *(f"{folder}/bin" for folder in _list_pyspark_folders())])


def _list_pyspark_folders() -> list[str]:
    spark = find_spec("pyspark")
    return list(spark.submodule_search_locations or ()) if spark else []


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
