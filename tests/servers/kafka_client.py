"""A Kafka client for tests: a small JVM with the broker's own jars, driven through py4j."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyspark
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway


class KafkaClient:
    """Makes topics and writes to them."""

    def __init__(self, jars: list[Path], servers: str) -> None:
        (own,) = (Path(pyspark.__file__).parent / "jars").glob("py4j-*.jar")
        classpath = ":".join(map(str, jars))
        port, token, self._process = launch_gateway(
            jarpath=str(own),
            classpath=classpath,
            die_on_exit=True,
            enable_auth=True,
            return_proc=True,
        )
        self.gateway = JavaGateway(
            gateway_parameters=GatewayParameters(port=port, auth_token=token, auto_convert=True)
        )
        self.jvm: Any = self.gateway.jvm
        self.servers = servers
        self.kafka = self.jvm.org.apache.kafka
        self.admin = self.kafka.clients.admin.AdminClient.create(self._properties())
        self._producers: dict[bool, Any] = {}

    def _properties(self, **more: str) -> Any:
        found = self.jvm.java.util.Properties()
        for name, value in {"bootstrap.servers": self.servers, **more}.items():
            found.setProperty(name.replace("_", "."), value)
        return found

    def topic(self, name: str, partitions: int, **config: str) -> None:
        """Make a topic."""
        new = self.kafka.clients.admin.NewTopic(name, partitions, self._short(1))
        new = new.configs({key.replace("_", "."): value for key, value in config.items()})
        self.admin.createTopics([new]).all().get()

    def allow(self, user: str, topic: str) -> None:
        """Let a user read a topic, and nothing else."""
        acl, resource = self.kafka.common.acl, self.kafka.common.resource
        place = resource.ResourcePattern(
            resource.ResourceType.TOPIC, topic, resource.PatternType.LITERAL
        )
        right = acl.AccessControlEntry(
            f"User:{user}", "*", acl.AclOperation.READ, acl.AclPermissionType.ALLOW
        )
        self.admin.createAcls([acl.AclBinding(place, right)]).all().get()

    def drop(self, name: str) -> None:
        """Delete a topic."""
        self.admin.deleteTopics([name]).all().get()

    def grow(self, name: str, partitions: int) -> None:
        """Add partitions."""
        self.admin.createPartitions(
            {name: self.kafka.clients.admin.NewPartitions.increaseTo(partitions)}
        ).all().get()

    def forget(self, name: str, partition: int, before: int) -> None:
        """Delete the records before an offset, as retention would."""
        place = self.kafka.common.TopicPartition(name, partition)
        # By reflection: py4j does not find a static method that shares its name with another.
        types, values = (
            self.gateway.new_array(self.jvm.Class, 1),
            self.gateway.new_array(self.jvm.Object, 1),
        )
        types[0], values[0] = self.jvm.Long.TYPE, before
        kind = self.jvm.Class.forName("org.apache.kafka.clients.admin.RecordsToDelete")
        self.admin.deleteRecords(
            {place: kind.getMethod("beforeOffset", types).invoke(None, values)}
        ).all().get()

    def send(
        self,
        topic: str,
        partition: int,
        value: str | bytes | None,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        transactional: bool = False,
    ) -> None:
        """Write one record; a transaction of one leaves a marker behind it."""
        producer = self._producer(transactional)
        body = value.encode() if isinstance(value, str) else value
        record = self.kafka.clients.producer.ProducerRecord(
            topic, partition, key and key.encode(), body
        )
        for name, text in (headers or {}).items():
            record.headers().add(name, text.encode())
        if transactional:
            producer.beginTransaction()
        producer.send(record)
        if transactional:
            producer.commitTransaction()

    def transaction(self, name: str, topic: str, values: Sequence[str]) -> Any:
        """Write into a transaction of a producer of its own.

        Whoever asked for it ends it, for example by `abortTransaction`.
        """
        # The default of a minute is over before a driver on a busy machine has read anything.
        producer = self._open(transactional_id=name, transaction_timeout_ms="600000")
        producer.initTransactions()
        producer.beginTransaction()
        for value in values:
            producer.send(
                self.kafka.clients.producer.ProducerRecord(topic, 0, None, value.encode())
            )
        producer.flush()
        return producer

    def flush(self) -> None:
        """Wait until everything is written."""
        for producer in self._producers.values():
            producer.flush()

    def close(self) -> None:
        """End the JVM."""
        self.gateway.shutdown()
        self._process.stdin.close()
        # Threads of py4j read and close its outputs, so `communicate` may meet a closed file.
        self._process.wait(timeout=60)

    def _producer(self, transactional: bool) -> Any:
        if transactional not in self._producers:
            producer = self._open(**({"transactional_id": "tests"} if transactional else {}))
            if transactional:
                producer.initTransactions()
            self._producers[transactional] = producer
        return self._producers[transactional]

    def _open(self, **own: str) -> Any:
        raw = "org.apache.kafka.common.serialization.ByteArraySerializer"
        properties = self._properties(
            key_serializer=raw, value_serializer=raw, linger_ms="5", **own
        )
        return self.kafka.clients.producer.KafkaProducer(properties)

    def _short(self, number: int) -> Any:
        return self.jvm.java.lang.Short.valueOf(str(number))
