"""Lists the jars that a pipeline needs in addition to those of Spark."""

from __future__ import annotations

import os
from typing import Final

from tidegate.jobs.spec.pipeline import PipelineSpec, SparkSpec

_KAFKA_TOKEN_PROVIDER: Final = "org.apache.spark:spark-token-provider-kafka-0-10_2.13"
AVRO: Final = "org.apache.spark:spark-avro_2.13:4.1.1"
KAFKA: Final = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.1",
    f"{_KAFKA_TOKEN_PROVIDER}:4.0.0",
)
"""The token provider of the connector's own version is missing in some registries.

4.0.0 has the same classes.
"""
_AWS_SDK: Final = "software.amazon.awssdk"
S3A: Final = (
    "org.apache.hadoop:hadoop-aws:3.4.2",
    *(f"{_AWS_SDK}:{name}:2.29.52" for name in ("s3", "s3-transfer-manager", "sts")),
)
"""13 MB instead of the 600 MB of the SDK's bundle, which hadoop-aws would bring along."""
_S3A_EXCLUDES: Final = (  # the bundle, and what Spark has itself
    f"{_AWS_SDK}:bundle",
    *(
        f"{group}:*"
        for group in ("org.wildfly.openssl", "io.netty", "org.slf4j", "org.apache.httpcomponents")
    ),
    *("commons-codec:*", "commons-logging:*"),
)


def add_connector_jars(spec: PipelineSpec) -> SparkSpec:
    """Return the Spark settings with the jars that sources, sinks and staging need.

    Settings that name jars themselves are returned unchanged.

    ``TIDEGATE_SPARK_JARS`` (comma-separated files) stands in for packages where no registry can be
    reached.
    """
    wanted, left_out = _select_kafka_packages(spec)
    if spec.spark.staging == "bucket":
        wanted, left_out = [*wanted, *S3A], [*left_out, *_S3A_EXCLUDES]
    if not wanted or {"spark.jars", "spark.jars.packages"} & set(spec.spark.conf):
        return spec.spark
    files = os.environ.get("TIDEGATE_SPARK_JARS")
    packages = {"spark.jars.packages": ",".join(wanted), "spark.jars.excludes": ",".join(left_out)}
    return spec.spark.model_copy(
        update={"conf": {**({"spark.jars": files} if files else packages), **spec.spark.conf}}
    )


def _select_kafka_packages(spec: PipelineSpec) -> tuple[list[str], list[str]]:
    """Packages of the connector, and what is not to come with them.

    Nothing where no topic is read or written by Spark.
    """
    topics = [source.kafka for source in spec.sources.values() if source.kafka is not None]
    into = any(
        sink.kind == "kafka" and sink.delivery == "at_least_once" for sink in spec.sinks.values()
    )
    landed = any(
        source.landing is not None and source.landing.format == "kafka"
        for source in spec.sources.values()
    )
    if not (topics or into or landed):
        return [], []
    return [*KAFKA, *([AVRO] if any(kafka.payload == "avro" for kafka in topics) else [])], [
        _KAFKA_TOKEN_PROVIDER
    ]
