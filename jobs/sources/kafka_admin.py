"""The broker's answers, through the Kafka client that Spark's connector brings into the driver's JVM.

A Python client would be a second implementation with settings of its own, and one more dependency;
this one reads exactly the settings the connector reads. Spark Connect has no JVM here, so a Kafka
source needs a classic session.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.sources.kafka_source import kafka_unreachable_error
from tidegate.jobs.spec.source_options import KafkaOptions, resolve_environment_value

_ANSWER_MILLIS: Final = 15_000  # milliseconds for one answer; the plan step has 120 s


def build_consumer_settings(kafka: KafkaOptions) -> dict[str, str]:
    """Settings of the Kafka client, with what is named ``env:NAME`` read from the environment.

    What a transaction wrote is read when it is committed; what it took back is no event.

    Raises:
        ConfigurationError: a variable that is not set.
    """
    options = {
        name: resolve_environment_value(f"kafka.options.{name}", value, os.environ)
        for name, value in kafka.options.items()
    }
    return {"bootstrap.servers": kafka.servers, "isolation.level": "read_committed", **options}


class JvmTopicOffsets:
    """Implements `Offsets` on the driver's JVM."""

    def __init__(self, kafka: KafkaOptions, jvm: Callable[[], Any] | None = None) -> None:
        self._kafka = kafka
        self._jvm = jvm or _get_spark_jvm
        self._admin: Any = None

    def read_offsets(self, *, settled: bool = True) -> Mapping[int, tuple[int, int]]:
        """Partition -> (first offset held, offset behind the last that may be read)."""
        with self._admin_session() as (jvm, admin):
            partitions = [
                info.partition() for info in self._describe_topic(jvm, admin).partitions()
            ]
            specs = jvm.org.apache.kafka.clients.admin.OffsetSpec
            ends = (specs.earliest(), specs.latest())
            first, behind = (
                self._list_offsets(jvm, admin, partitions, spec, settled=settled) for spec in ends
            )
            return {partition: (first[partition], behind[partition]) for partition in partitions}

    def read_topic_id(self) -> str | None:
        """The id of the topic that has the name now."""
        with self._admin_session() as (jvm, admin):
            found = str(self._describe_topic(jvm, admin).topicId().toString())
            return (
                None
                if found == str(jvm.org.apache.kafka.common.Uuid.ZERO_UUID.toString())
                else found
            )

    @contextmanager
    def _admin_session(self) -> Iterator[tuple[Any, Any]]:
        """The JVM and its admin client; what goes wrong is told in our words."""
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
        clients = jvm.org.apache.kafka
        committed = (
            settled and build_consumer_settings(self._kafka)["isolation.level"] == "read_committed"
        )
        level = (
            clients.common.IsolationLevel.READ_COMMITTED
            if committed
            else clients.common.IsolationLevel.READ_UNCOMMITTED
        )
        asked = jvm.java.util.HashMap()
        places = {
            partition: jvm.org.apache.kafka.common.TopicPartition(self._kafka.topic, partition)
            for partition in partitions
        }
        for place in places.values():
            asked.put(place, spec)
        answer = admin.listOffsets(asked, clients.clients.admin.ListOffsetsOptions(level))
        return {
            partition: answer.partitionResult(place).get().offset()
            for partition, place in places.items()
        }

    def _get_admin_client(self, jvm: Any) -> Any:
        if self._admin is None:
            settings = jvm.java.util.Properties()
            for name, value in build_consumer_settings(self._kafka).items():
                settings.setProperty(name, value)
            settings.remove("isolation.level")  # of consumers
            settings.setProperty("request.timeout.ms", str(_ANSWER_MILLIS // 2))
            settings.setProperty("default.api.timeout.ms", str(_ANSWER_MILLIS))
            try:
                self._admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(settings)
            except TypeError as error:  # py4j gives a package for a class that is not there
                raise ConfigurationError(
                    "the driver's JVM has no Kafka client",
                    code="kafka.no_client",
                    kept="nothing was started or changed",
                    advice=(
                        "leave spark.jars and spark.jars.packages out of spark.conf, or name"
                        " spark-sql-kafka-0-10 there"
                    ),
                ) from error
        return self._admin

    def _close_admin_client(self) -> None:
        """The next question opens a new client.

        An old one may hold the addresses of brokers that are gone.
        """
        if self._admin is not None:
            self._admin.close(self._jvm().java.time.Duration.ofMillis(0))
            self._admin = None

    def _translate_jvm_error(self, cause: Any) -> TransientError | ConfigurationError:
        while cause.getCause() is not None:
            cause = cause.getCause()
        kind, said = cause.getClass().getSimpleName(), str(cause.getMessage())
        topic, servers = self._kafka.topic, self._kafka.servers
        if (
            kind == "ConfigException" and "resolvable" in said
        ):  # Kafka's word for names that DNS does not know, or not now
            return kafka_unreachable_error(servers, said)
        if kind == "UnknownTopicOrPartitionException":
            return TransientError(
                f"there is no topic {topic} at {servers}",
                code="kafka.no_topic",
                kept="everything sealed so far",
                advice="make the topic, or mend kafka.topic; tidegate looks again",
                retry_after=5.0,
            )
        if (
            kind.endswith(("AuthenticationException", "AuthorizationException", "ConfigException"))
            and "Ssl" not in kind
        ):
            return ConfigurationError(
                f"Kafka at {servers} refuses this client: {said}",
                code="kafka.denied",
                kept="everything sealed so far",
                advice="check kafka.options and the rights on the topic: describe and read",
            )
        if kind.startswith(
            ("Certificate", "CertPath", "SunCertPath", "SSLHandshake", "SslAuthentication")
        ):
            return kafka_unreachable_error(
                servers,
                f"its certificate: {said}; nothing was sent",
                "renew it, or name its CA in ssl.truststore.*",
            )
        return kafka_unreachable_error(servers, f"{kind}: {said}")


def _get_spark_jvm() -> Any:
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None or context._jvm is None:
        raise ConfigurationError(
            "a Kafka source needs a Spark session with a JVM of its own, which Spark Connect"
            " has not",
            code="kafka.no_jvm",
            kept="nothing was started or changed",
            advice=(
                "use a spark.master other than sc://, or land the topic (see docs/landing.md)"
            ),
        )
    return context._jvm
