"""The Spark session of a pipeline: settings that the mover's results and its speed depend on."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Final, cast

from pyspark.sql import SparkSession

from tidegate.jobs.spark.class_archive import build_archive_options
from tidegate.jobs.spec.packages import add_connector_jars
from tidegate.jobs.spec.pipeline import PipelineSpec, SparkSpec

__all__ = ["INTERPRETED_SETTINGS", "SESSION_SETTINGS", "runs_on_one_host", "open_session", "open_quick_session"]

SESSION_SETTINGS: Final[dict[str, str]] = {
    # What results depend on.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # pyiceberg refuses INT96
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInRead": "CORRECTED",
    "spark.sql.legacy.parquet.nanosAsLong": "true",
    "spark.sql.caseSensitive": "true",  # Parquet names are
    # The rule evaluates to_json on the driver with a generator that all threads planning the same frame would share.
    "spark.sql.optimizer.excludedRules": "org.apache.spark.sql.catalyst.optimizer.ConvertToLocalRelation",
    # What speed depends on: epochs are small, so planning and scheduling count more than the best plan.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.parquet.compression.codec": "snappy",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.sources.useV1SourceList": "avro,csv,json,orc,parquet,text",  # Kafka's newer reader makes no Row of a message
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",  # listing by a Spark job costs more than it saves
}
INTERPRETED_SETTINGS: Final[dict[str, str]] = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""For few rows. Frontiers and positions are literals of the generated code, so every epoch would compile all of it anew."""
_CLASSIC_SETTINGS: Final[dict[str, str]] = {  # settings of the process, which Spark Connect has on its server
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.codegen.cache.maxEntries": "1000",  # the same few plans return in every epoch: never compile them twice
    "spark.locality.wait": "0s",
    "spark.io.compression.codec": "lz4",
    "spark.kafka.consumer.cache.capacity": "1024",  # partitions whose consumers are kept from epoch to epoch
    "spark.sql.ui.retainedExecutions": "1",
    "spark.ui.retainedJobs": "1",
    "spark.ui.retainedStages": "1",
    "spark.ui.retainedTasks": "1",
}
_ONE_HOST_SETTINGS: Final[dict[str, str]] = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
"""Only without a cluster: executors elsewhere have to reach the driver; SPARK_LOCAL_IP and Spark's settings say where."""
# A new JVM spends most of its first minute compiling what a small epoch runs only a few times.
_QUICK_JVM: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_JVM_OPTIONS: Final = "spark.driver.extraJavaOptions"
_CONNECT_RETRIES: Final = 6
"""Of a request to a Connect server, about 20 s: then it is gone, and what it held is gone with it. The default is ten minutes."""


def open_session(spec: PipelineSpec) -> SparkSession:
    """Start (or join) the session the spec asks for: classic by default, Spark Connect for an ``sc://`` master."""
    logging.getLogger("py4j").setLevel(logging.ERROR)
    if spec.spark.master.startswith("local"):  # else tasks in Python run with whatever is called python3
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return _open_connect_session(spec.spark) if spec.spark.master.startswith("sc://") else _start_classic_session(add_connector_jars(spec), spec.name)


def _start_classic_session(spark: SparkSpec, name: str) -> SparkSession:
    builder = SparkSession.builder.appName(f"tidegate {name}").config("spark.driver.memory", spark.driver_memory)
    if not _is_spark_submit():  # else it has been told its master
        builder = builder.master(spark.master)
    place = _ONE_HOST_SETTINGS if runs_on_one_host(spark) else {}
    quick = _QUICK_JVM if spark.jvm == "quick" else ""
    options = " ".join(filter(None, (quick, build_archive_options(), spark.conf.get(_JVM_OPTIONS))))
    for key, value in {**_CLASSIC_SETTINGS, **place, **SESSION_SETTINGS, **spark.conf, _JVM_OPTIONS: options}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _open_connect_session(spark: SparkSpec) -> SparkSession:
    from pyspark.sql.connect.client.retries import DefaultPolicy

    session: Any = SparkSession.builder.remote(spark.master).getOrCreate()
    session.client.set_retry_policies([DefaultPolicy(max_retries=_CONNECT_RETRIES)])
    for key, value in {**SESSION_SETTINGS, **spark.conf}.items():
        if key.startswith("spark.sql."):
            session.conf.set(key, value)
    return cast(SparkSession, session)


def runs_on_one_host(spark: SparkSpec) -> bool:
    """Whether tasks run in the driver's own process."""
    return spark.master.startswith("local") and not _is_spark_submit()


def _is_spark_submit() -> bool:
    """spark-submit has started this process."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def open_quick_session(session: SparkSession) -> SparkSession:
    """A session beside this one for queries over few rows; the same one where Spark Connect allows no other."""
    if not hasattr(session, "_jsparkSession"):
        return session
    quick: SparkSession = session.newSession()
    for key, value in INTERPRETED_SETTINGS.items():  # the rest it has from the same process
        quick.conf.set(key, value)
    return quick
