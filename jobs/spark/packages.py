"""Jars a pipeline's sources and sinks need beside Spark's own."""

from __future__ import annotations

import os
from typing import Final

from tidegate.jobs.spec.pipeline import PipelineSpec, SparkSpec

__all__ = ["PACKAGES", "with_connectors"]

_CONNECTOR: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.1"
_TOKENS: Final = "org.apache.spark:spark-token-provider-kafka-0-10_2.13"
_AVRO: Final = "org.apache.spark:spark-avro_2.13:4.1.1"
PACKAGES: Final = (_CONNECTOR, f"{_TOKENS}:4.0.0")
"""The token provider of the connector's own version is missing in some registries; 4.0.0 has the same classes."""


def with_connectors(spec: PipelineSpec) -> SparkSpec:
    """The pipeline's Spark settings with the connectors its sources and sinks need, unless they name jars themselves.

    ``TIDEGATE_SPARK_JARS`` (comma-separated files) stands in for packages where no registry can be reached.
    """
    topics = [source.kafka for source in spec.sources.values() if source.kafka is not None]
    into = any(sink.kind == "kafka" and sink.delivery == "at_least_once" for sink in spec.sinks.values())
    landed = any(source.landing is not None and source.landing.format == "kafka" for source in spec.sources.values())
    if not (topics or into or landed) or {"spark.jars", "spark.jars.packages"} & set(spec.spark.conf):
        return spec.spark
    files = os.environ.get("TIDEGATE_SPARK_JARS")
    wanted = [*PACKAGES, *([_AVRO] if any(kafka.payload == "avro" for kafka in topics) else [])]
    jars = {"spark.jars": files} if files else {"spark.jars.packages": ",".join(wanted), "spark.jars.excludes": _TOKENS}
    return spec.spark.model_copy(update={"conf": {**jars, **spec.spark.conf}})
