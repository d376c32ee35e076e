"""Asks the broker for topic ids and offsets, through the Java client in the driver's JVM.

Spark's connector brings that client, and `kafka.options` has its names for settings, which
confluent-kafka does not understand (docs/dependencies.md, Kafka). With Spark Connect the driver has
no JVM, so a Kafka source needs a classic session.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.sources.errors import (
    KAFKA_CERTIFICATE,
    KAFKA_DENIED,
    KAFKA_NO_CLIENT,
    KAFKA_NO_JVM,
    KAFKA_NO_TOPIC,
    KAFKA_UNAVAILABLE,
)
from tidegate.jobs.spec.source_options import KafkaOptions, resolve_environment_value

_TIMEOUT_MILLIS: Final = 15_000  # of one question; the plan step as a whole has 120 s
_REFUSALS: Final = ("AuthenticationException", "AuthorizationException", "ConfigException")
_CERTIFICATE_FAULTS: Final = (
    "Certificate",
    "CertPath",
    "SunCertPath",
    "SSLHandshake",
    "SslAuthentication",
)


def build_consumer_settings(kafka: KafkaOptions) -> dict[str, str]:
    """Return the Kafka client's settings, with values ``env:NAME`` read from the environment.

    Unless the options set another isolation level, only committed messages are read.

    Raises:
        ConfigurationError: a variable is not set.
    """
    options = {
        name: resolve_environment_value(f"kafka.options.{name}", value, os.environ)
        for name, value in kafka.options.items()
    }
    return {"bootstrap.servers": kafka.servers, "isolation.level": "read_committed", **options}


class JvmTopicOffsets:
    """Implements `TopicOffsets` with the AdminClient of the driver's JVM."""

    def __init__(self, kafka: KafkaOptions, jvm: Callable[[], Any] | None = None) -> None:
        self._kafka = kafka
        self._jvm = jvm or _get_spark_jvm
        self._admin: Any = None

    def read_offsets(self, *, settled: bool = True) -> Mapping[int, tuple[int, int]]:
        """Return partition -> (first offset held, offset after the last that may be read)."""
        with self._admin_session() as (jvm, admin):
            partitions = [
                info.partition() for info in self._describe_topic(jvm, admin).partitions()
            ]
            specs = jvm.org.apache.kafka.clients.admin.OffsetSpec
            first, end = (
                self._list_offsets(jvm, admin, partitions, spec, settled=settled)
                for spec in (specs.earliest(), specs.latest())
            )
            return {partition: (first[partition], end[partition]) for partition in partitions}

    def read_topic_id(self) -> str | None:
        """Return the id of the topic that has the name now; None from brokers without ids."""
        with self._admin_session() as (jvm, admin):
            topic_id = self._describe_topic(jvm, admin).topicId()
            if topic_id.equals(jvm.org.apache.kafka.common.Uuid.ZERO_UUID):
                return None
            return str(topic_id.toString())

    @contextmanager
    def _admin_session(self) -> Iterator[tuple[Any, Any]]:
        """Give the JVM and its admin client; translate the client's exceptions."""
        from py4j.protocol import Py4JJavaError

        try:
            jvm = self._jvm()
            yield jvm, self._get_admin_client(jvm)
        except Py4JJavaError as error:
            self._close_admin_client()
            raise self._translate_jvm_error(error.java_exception) from None

    def _describe_topic(self, jvm: Any, admin: Any) -> Any:
        names = jvm.java.util.Collections.singletonList(self._kafka.topic)
        return admin.describeTopics(names).allTopicNames().get().get(self._kafka.topic)

    def _list_offsets(
        self, jvm: Any, admin: Any, partitions: list[int], spec: Any, *, settled: bool
    ) -> dict[int, int]:
        kafka = jvm.org.apache.kafka
        isolation = build_consumer_settings(self._kafka)["isolation.level"]
        levels = kafka.common.IsolationLevel
        level = (
            levels.READ_COMMITTED
            if settled and isolation == "read_committed"
            else levels.READ_UNCOMMITTED
        )
        question = jvm.java.util.HashMap()
        keys = {p: kafka.common.TopicPartition(self._kafka.topic, p) for p in partitions}
        for key in keys.values():
            question.put(key, spec)
        answer = admin.listOffsets(question, kafka.clients.admin.ListOffsetsOptions(level))
        return {p: answer.partitionResult(key).get().offset() for p, key in keys.items()}

    def _get_admin_client(self, jvm: Any) -> Any:
        if self._admin is None:
            settings = jvm.java.util.Properties()
            for name, value in build_consumer_settings(self._kafka).items():
                settings.setProperty(name, value)
            settings.remove("isolation.level")  # a setting of consumers only
            settings.setProperty("request.timeout.ms", str(_TIMEOUT_MILLIS // 2))
            settings.setProperty("default.api.timeout.ms", str(_TIMEOUT_MILLIS))
            try:
                self._admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(settings)
            except TypeError as error:  # py4j takes the name of an absent class for a package
                raise KAFKA_NO_CLIENT() from error
        return self._admin

    def _close_admin_client(self) -> None:
        """Let the next question open a new client: this one may hold addresses of dead brokers."""
        if self._admin is not None:
            self._admin.close(self._jvm().java.time.Duration.ofMillis(0))
            self._admin = None

    def _translate_jvm_error(self, cause: Any) -> TransientError | ConfigurationError:
        while cause.getCause() is not None:
            cause = cause.getCause()
        kind, detail = cause.getClass().getSimpleName(), str(cause.getMessage())
        topic, servers = self._kafka.topic, self._kafka.servers
        # "No resolvable bootstrap urls": DNS does not know the names, perhaps only now.
        if kind == "ConfigException" and "resolvable" in detail:
            return KAFKA_UNAVAILABLE(servers=servers, detail=detail)
        if kind == "UnknownTopicOrPartitionException":
            return KAFKA_NO_TOPIC(topic=topic, servers=servers)
        if kind.endswith(_REFUSALS) and "Ssl" not in kind:
            return KAFKA_DENIED(servers=servers, detail=detail)
        if kind.startswith(_CERTIFICATE_FAULTS):
            return KAFKA_CERTIFICATE(servers=servers, detail=detail)
        return KAFKA_UNAVAILABLE(servers=servers, detail=f"{kind}: {detail}")


def _get_spark_jvm() -> Any:
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None or context._jvm is None:
        raise KAFKA_NO_JVM()
    return context._jvm
