"""The Spark session of a pipeline: settings that the mover's results and its speed depend on."""

import hashlib
import logging
import os
import pickle
import re
import shutil
import sys
import tempfile
from base64 import b64decode, b64encode
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Final, cast

import pyspark
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tidegate.errors import PoisonError, TidegateError, TransientError
from tidegate.jobs.rows.stored_partials import RESULT_BYTES
from tidegate.jobs.rules.native_support import (
    explain_spark_aggregates,
    explain_unproven_expressions,
)
from tidegate.jobs.spec.executor_memory import build_container_settings
from tidegate.jobs.spec.operations import QUICK_COMPILING, SparkSpec, add_connector_jars
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import read_data_file

from .errors import EXECUTORS_LOST, RESULTS_TOO_LARGE

_SETTINGS: dict[str, dict[str, str]] = read_data_file(__package__, "spark_settings.toml")
RESULT_SETTING: Final = "spark.driver.maxResultSize"
"""Bytes that the tasks of a job may send to the driver."""
_JVM_OPTIONS = "spark.driver.extraJavaOptions"
_EXECUTOR_OPTIONS: Final = "spark.executor.defaultJavaOptions"
"""Options of executors, to which Spark adds the user's own."""
_CONNECT_RETRIES = 6
"""Of a request to a Connect server, about 20 s: then it is gone, and what it held is gone with it.

The default is ten minutes.
"""


def bound_results(spec: PipelineSpec) -> PipelineSpec:
    """Return the spec with the bound of what tasks send, unless it has one, for `open_session`."""
    conf = {RESULT_SETTING: str(RESULT_BYTES), **spec.spark.conf}
    return spec.model_copy(update={"spark": spec.spark.model_copy(update={"conf": conf})})


def open_session(spec: PipelineSpec) -> SparkSession:
    """Start (or join) the session the spec asks for.

    Classic by default, Spark Connect for an ``sc://`` master. Under spark-submit its master counts,
    not the spec's.
    """
    logging.getLogger("py4j").setLevel(logging.ERROR)
    if spec.spark.uses_connect:
        return _open_connect_session(spec.spark)
    # Without it, tasks in Python run with whatever is called python3. Only spark-submit reads the
    # setting.
    python = spec.spark.conf.get("spark.pyspark.python", sys.executable)
    os.environ.setdefault("PYSPARK_PYTHON", python)
    spark = add_connector_jars(spec)
    # Spark SQL is known to evaluate all rows of a source or of a window.
    if explain_unproven_expressions(spec) or explain_spark_aggregates(spec):
        if spark.jvm == "auto" and runs_on_one_host(spark):
            spark = spark.model_copy(update={"jvm": "throughput"})
    elif spark.jvm != "throughput" and not is_submitted():
        conf = {_EXECUTOR_OPTIONS: QUICK_COMPILING, **spark.conf}
        spark = spark.model_copy(update={"conf": conf})
    return start_classic_session(spark, spec.name)


def start_classic_session(spark: SparkSpec, name: str) -> SparkSession:
    """Start (or join) a session in this process; the master of spark-submit wins."""
    builder = SparkSession.builder.appName(f"tidegate {name}")
    if not is_submitted():  # else it knows its master
        builder = builder.master(spark.master)
    # No table is ever in the warehouse. A folder that exists keeps Spark from making
    # `spark-warehouse` in the working folder.
    local = {**_SETTINGS["one_host"], "spark.sql.warehouse.dir": tempfile.gettempdir()}
    place = local if runs_on_one_host(spark) else {}
    given = (spark.jvm_options, build_archive_options(), spark.conf.get(_JVM_OPTIONS))
    options = " ".join(filter(None, given))
    settings: dict[str, Any] = {"spark.driver.memory": spark.driver_memory, **_SETTINGS["classic"]}
    if not is_submitted():
        settings |= build_container_settings(spark.master, spark.conf)
    settings |= {**place, **_SETTINGS["session"], **spark.conf, _JVM_OPTIONS: options}
    # Workers get all files of `spark-submit --py-files`, and look for modules in these.
    pyspark.SparkContext.PACKAGE_EXTENSIONS = (".zip", ".egg", ".jar", ".whl")
    return builder.config(map=settings).getOrCreate()


def _open_connect_session(spark: SparkSpec) -> SparkSession:
    from pyspark.sql.connect.client.retries import DefaultPolicy

    session: Any = SparkSession.builder.remote(spark.master).getOrCreate()
    session.client.set_retry_policies([DefaultPolicy(max_retries=_CONNECT_RETRIES)])
    for key, value in {**_SETTINGS["session"], **spark.conf}.items():
        if key.startswith("spark.sql."):
            session.conf.set(key, value)
    return cast(SparkSession, session)


def runs_on_one_host(spark: SparkSpec) -> bool:
    """Whether the master is a local one, and spark-submit has not started this process."""
    return spark.master.startswith("local") and not is_submitted()


def is_submitted() -> bool:
    """Whether spark-submit has started this process, as a child of its JVM."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def stop_session(session: SparkSession) -> None:
    """Stop a session without a wait for PySpark's server of accumulators.

    It looks once in a second whether it shall end. No job runs any more whose answers it takes.
    """
    context: Any = getattr(session, "sparkContext", None)  # Spark Connect has none
    server = getattr(context, "_accumulatorServer", None)
    if server is not None:
        context._accumulatorServer = None

        def end_server() -> None:
            """End it, and do not mind that its socket has gone."""
            with suppress(FileNotFoundError):
                server.shutdown()

        Thread(target=end_server, daemon=True).start()
    session.stop()
    if server is not None and isinstance(server.server_address, str):  # a socket of this host
        Path(server.server_address).unlink(missing_ok=True)


# An archive of the JVM's loaded classes, made once per machine, that lets every later driver start
# in less time.
#
# A driver that replaces a killed one spends most of its gap loading and verifying some fifteen
# thousand classes of Spark. Java's class data sharing keeps them in a file in the form the JVM has
# them in memory. The archive fits one Java and one set of jars; the JVM itself checks that, and one
# that does not fit is ignored. `tidegate warm` makes it (decision 0007 has the figures).

# : Names the file an archive is written to when the JVM of this process ends; set by `tidegate
# warm` only.
ARCHIVE_DUMP_VARIABLE = "TIDEGATE_CLASS_ARCHIVE_DUMP"
_ARCHIVE_LOG_OPTIONS = (  # an archive that does not fit is worth no line in every log
    "-Xlog:disable -Xlog:all=error:stderr"
)


def locate_class_archive() -> Path | None:
    """Where the archive of this machine's Java and Spark belongs, whether or not it is there.

    None without a Java.
    """
    java = _find_java()
    environment = os.environ
    if java is None:
        return None
    known = java.stat()
    jars = environment.get("SPARK_HOME") or str(Path(pyspark.__file__).parent)
    parts = (str(java), known.st_size, known.st_mtime_ns, jars, pyspark.__version__)
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(
        base, "tidegate", "jvm", hashlib.sha256(repr(parts).encode()).hexdigest()[:16] + ".jsa"
    )


def build_archive_options() -> str:
    """Options of the driver's JVM that use the archive, or write it; empty when there is none."""
    target = os.environ.get(ARCHIVE_DUMP_VARIABLE)
    if target:
        return f'"-XX:ArchiveClassesAtExit={target}" {_ARCHIVE_LOG_OPTIONS}'
    archive = locate_class_archive()
    return (
        f'"-XX:SharedArchiveFile={archive}" -Xshare:auto {_ARCHIVE_LOG_OPTIONS}'
        if archive is not None and archive.is_file()
        else ""
    )


def _find_java() -> Path | None:
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home, "bin", "java")) if home else shutil.which("java")
    return Path(found).resolve() if found and Path(found).exists() else None


# What Spark raises when a job fails, in one line, and whether the rows or the world failed it.
#
# The planner and Spark Connect raise PySpark's own errors; a job of a classic session that fails in
# its tasks comes as Py4J's.

SPARK_ERRORS: Final = (PySparkException, Py4JJavaError)
"""For `except`."""
_LOST_EXECUTOR_SIGNS = (
    "ExecutorLostFailure",
    "FetchFailed",
    "Python worker exited unexpectedly",
    "worker lost",
)


_BEFORE_PYTHON_ERROR: Final = (
    "Traceback (most recent call last):",
    "Please see the stack trace below.",  # through Spark Connect
)
_PYTHON_ERROR: Final = re.compile(r"(?!org\.)[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b")


def lines(error: BaseException) -> list[str]:
    """What the error and Java's errors behind it say: its lines but for blanks and stack frames."""
    found = f"{error}\n{getattr(error, '_stackTrace', None) or ''}".splitlines()
    return [line.strip() for line in found if line.strip() and not line.lstrip().startswith("at ")]


def extract_cause(error: BaseException) -> str:
    r"""The line that names the cause: the last of Java's causes, else the first line.

    At most 500 characters.

    >>> extract_cause(PySparkException("bad\n\tat org.x\nCaused by: java.io.IOException: gone"))
    'java.io.IOException: gone'
    """
    found = lines(error)
    causes = [line.removeprefix("Caused by: ") for line in found if line.startswith("Caused by: ")]
    own = [
        line.removeprefix(": ")
        for line in found
        if not line.startswith("An error occurred while calling")
    ]
    cause = (causes[-1:] or own[:1] or [type(error).__name__])[0]
    if cause.endswith(_BEFORE_PYTHON_ERROR):
        # The error of a Python worker is the last line of its traceback.
        cause = next(filter(_PYTHON_ERROR.match, reversed(found)), cause)
    return cause[:500]


_CARRIED: Final = "tidegate's own error: "


def carry_error(error: TidegateError) -> RuntimeError:
    """Return what a task raises for an error that it cannot answer with; see `find_carried_error`.

    Only a task whose output is rows for Spark SQL has no answer. Spark tries it again.
    """
    return RuntimeError(_CARRIED + b64encode(pickle.dumps(error)).decode("ascii"))


def find_carried_error(error: BaseException) -> TidegateError | None:
    """Return the error that a task has raised by `carry_error`; None for other errors of Spark."""
    found = re.search(_CARRIED + "([A-Za-z0-9+/]+=*)", "\n".join(lines(error)))
    if found is None:
        return None
    try:
        carried = pickle.loads(b64decode(found[1]))  # noqa: S301 - of our tasks
    except Exception:  # cut off on its way
        return None
    return carried if isinstance(carried, TidegateError) else None


def detect_large_results(pipeline: str, error: BaseException) -> PoisonError | None:
    """Return the error for a job that sends more than `RESULT_SETTING` allows; None for others."""
    found = next((line for line in lines(error) if RESULT_SETTING in line), None)
    return None if found is None else RESULTS_TOO_LARGE(pipeline=pipeline, cause=found[:500])


def detect_lost_executors(
    what: str,
    error: BaseException,
    pipeline: str | None = None,
) -> TransientError | None:
    """Return the error for a job that lost its executors or their Python; None for other causes.

    `what` names the pipeline, or the source that was read.
    """
    text = "\n".join(lines(error))
    sign = next((sign for sign in _LOST_EXECUTOR_SIGNS if sign in text), None)
    return None if sign is None else EXECUTORS_LOST(pipeline=pipeline, what=what, sign=sign)
