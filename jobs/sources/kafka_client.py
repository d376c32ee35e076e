"""The Kafka client that reads topics: confluent-kafka (librdkafka), in the driver and in tasks.

`kafka.options` has names of its settings, or those names of the Java client that
`translate_settings` knows.
"""

import re
import time
from base64 import urlsafe_b64encode
from collections.abc import Generator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tidegate.errors import TidegateError
from tidegate.jobs.spec.source_options import KafkaOptions
from tidegate.time_units import TICK_MAX

from .errors import (
    CHANGED_WHILE_READ,
    KAFKA_CERTIFICATE,
    KAFKA_DENIED,
    KAFKA_NO_CLIENT,
    KAFKA_NO_TOPIC,
    KAFKA_OTHER_OPTION,
    KAFKA_UNAVAILABLE,
)

MESSAGE_SCHEMA: Final = pa.schema(
    {
        "key": pa.binary(),
        "value": pa.binary(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", "UTC"),
        "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
    }
)
"""Columns of the batches that `RangeReader.read_ranges` yields.

`timestamp` is null unless a column takes it, and where no column can hold it; so are `headers`
unless a column takes one.
"""

_LOGIN = re.compile(
    r"\s*org\.apache\.kafka\.common\.security\.(?:plain\.Plain|scram\.Scram)LoginModule"
    r'\s+required\s+username="([^"\\]*)"\s+password="([^"\\]*)"\s*;\s*'
)
_STORES: Final = {
    "truststore": ("ssl.ca.location",),
    "keystore": ("ssl.certificate.location", "ssl.key.location"),
}
"""Files of TLS by Java's names, and the settings that take such a file in PEM."""
_SAME_STORES: Final = (("keystore", None), ("keystore", "PKCS12"))
"""Files that librdkafka takes by Java's name for them."""
_LEAVE_OUT: Final = "leave it out, or name a setting of librdkafka (its CONFIGURATION.md has all)"
_INSTEAD: Final = {
    "sasl.jaas.config": "use sasl.username and sasl.password; of Java's texts only those with the"
    " PlainLoginModule or a ScramLoginModule are understood",
    "sasl.oauthbearer": "use sasl.oauthbearer.method: oidc with sasl.oauthbearer.client.id,"
    " sasl.oauthbearer.client.secret and sasl.oauthbearer.token.endpoint.url",
    "sasl.login": "use sasl.oauthbearer.method: oidc and what belongs to it",
    "ssl.truststore": "use ssl.ca.location with the authorities in PEM (keytool -exportcert -rfc"
    " writes it); without one, those of the system are trusted",
    "ssl.keystore": "use ssl.certificate.location and ssl.key.location in PEM, or"
    " ssl.keystore.location with ssl.keystore.type: PKCS12",
    "ssl.protocol": "leave it out; the two sides agree on the newest version of TLS",
    "ssl.enabled.protocols": "leave it out; the two sides agree on the newest version of TLS",
    "fetch.max.wait.ms": "leave it out; tidegate sets fetch.wait.max.ms itself",
    "receive.buffer.bytes": "use socket.receive.buffer.bytes",
    "send.buffer.bytes": "use socket.send.buffer.bytes",
    "default.api.timeout.ms": "use socket.timeout.ms",
    "max.request.size": "use message.max.bytes",
    "buffer.memory": "use queue.buffering.max.kbytes",
}
"""Beginnings of names that only Java's client has, and what to do."""
_Settings = dict[str, Any]
_CONNECTION_SETTINGS: _Settings = {
    "log_level": 0,
    # A firewall may forget a silent connection, and the next question on it would get no answer.
    "connections.max.idle.ms": 180_000,
    "socket.keepalive.enable": True,
}
_READER_SETTINGS: _Settings = {
    **_CONNECTION_SETTINGS,
    "check.crcs": True,
    "group.id": "tidegate",  # the client wants a name; nothing is ever committed to the group
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "fetch.wait.max.ms": 1,  # all messages of a range are there; one at the end must not wait
    "fetch.queue.backoff.ms": 10,
    "queued.min.messages": 200_000,
    "queued.max.messages.kbytes": 32_768,
    "fetch.message.max.bytes": 4 << 20,
}
_MOST_MESSAGES = 20_000
"""Messages of one batch."""
_CALL_SECONDS = 0.1
_SILENCE_SECONDS = 30.0
"""So long a broker may send nothing of a range that it has."""
_QUESTION_SECONDS = 15.0


def translate_settings(settings: Mapping[str, str]) -> _Settings:
    """Return settings of librdkafka for those of a spec, which may have names of the Java client.

    Raises:
        ConfigurationError: the library is not installed, or has no such setting.

    >>> translate_settings({"bootstrap.servers": "b:9092", "isolation.level": "READ_COMMITTED"})
    {'bootstrap.servers': 'b:9092', 'isolation.level': 'read_committed'}
    """
    found: _Settings = dict(settings)
    login = _LOGIN.fullmatch(found.get("sasl.jaas.config", ""))
    if login is not None:
        del found["sasl.jaas.config"]
        found["sasl.username"], found["sasl.password"] = login.groups()
    for store, names in _STORES.items():
        place, kind = f"ssl.{store}.location", found.pop(f"ssl.{store}.type", None)
        if place in found and kind == "PEM":
            found |= dict.fromkeys(names, found.pop(place))
        elif place in found and (store, kind) not in _SAME_STORES:
            raise _refuse_option(place)
    if found.get("ssl.endpoint.identification.algorithm") == "":  # Java's word for no check
        found["ssl.endpoint.identification.algorithm"] = "none"
    if "isolation.level" in found:
        found["isolation.level"] = found["isolation.level"].lower()
    for name in found:
        if not _is_known_option(name):
            raise _refuse_option(name)
    return found


@cache
def _is_known_option(name: str) -> bool:
    try:
        from confluent_kafka import Consumer, KafkaException
    except ImportError as error:
        raise KAFKA_NO_CLIENT() from error
    try:
        # The second name exists nowhere, so no client is opened. Values are judged later.
        Consumer({"group.id": "tidegate", name: "", "tidegate.no.option": ""})
    except TypeError:  # a function is wanted, which no spec has
        return False
    except KafkaException as error:
        said = error.args[0].str()
        return "not supported" not in said and f'No such configuration property: "{name}"' != said
    return True


def _refuse_option(name: str) -> TidegateError:
    instead = next((own for known, own in _INSTEAD.items() if name.startswith(known)), _LEAVE_OUT)
    return KAFKA_OTHER_OPTION(option=name, instead=instead)


class ClientTopicOffsets:
    """Implements `TopicOffsets` (kafka_source.py).

    Args:
        kafka: the source's options.
        settings: what `translate_settings` returned for them.
    """

    def __init__(self, kafka: KafkaOptions, settings: _Settings) -> None:
        self._kafka, self._settings = kafka, settings
        self._refusal = Refusal()
        self._admin: Any = None

    def read_offsets(self, *, settled: bool = True) -> Mapping[int, tuple[int, int]]:
        """Return partition -> (first offset held, offset after the last that may be read)."""
        from confluent_kafka import IsolationLevel, KafkaException, TopicPartition

        specs: Any = import_module("confluent_kafka.admin").OffsetSpec
        self._forget_refusals()
        committed = settled and self._settings["isolation.level"] == "read_committed"
        level = "READ_COMMITTED" if committed else "READ_UNCOMMITTED"
        try:
            partitions = [one.id for one in self._describe_topic().partitions]
            first, end = (
                self._get_admin_client().list_offsets(
                    {TopicPartition(self._kafka.topic, p): spec for p in partitions},
                    isolation_level=IsolationLevel[level],
                    request_timeout=_QUESTION_SECONDS,
                )
                for spec in (specs.earliest(), specs.latest())
            )
            bounds = [
                {place.partition: answer.result().offset for place, answer in answers.items()}
                for answers in (first, end)
            ]
        except KafkaException as error:
            raise self._give_up(error) from error
        return {partition: (bounds[0][partition], bounds[1][partition]) for partition in partitions}

    def read_topic_id(self) -> str | None:
        """Return the id of the topic that has the name now; None from brokers without ids."""
        from confluent_kafka import KafkaException

        self._forget_refusals()
        try:
            found = self._describe_topic().topic_id
        except KafkaException as error:
            raise self._give_up(error) from error
        halves = (found.get_most_significant_bits(), found.get_least_significant_bits())
        raw = b"".join(half.to_bytes(8, "big", signed=True) for half in halves)
        # The same text as the Java client gives: positions in manifests have it.
        return urlsafe_b64encode(raw).decode().rstrip("=") if any(raw) else None

    def _describe_topic(self) -> Any:
        from confluent_kafka import TopicCollection

        names = TopicCollection([self._kafka.topic])
        answers = self._get_admin_client().describe_topics(names, request_timeout=_QUESTION_SECONDS)
        return answers[self._kafka.topic].result()

    def _get_admin_client(self) -> Any:
        if self._admin is None:
            from confluent_kafka.admin import AdminClient

            settings = {k: v for k, v in self._settings.items() if k != "isolation.level"}
            own = {**_CONNECTION_SETTINGS, "error_cb": self._refusal.note_error}
            self._admin = AdminClient({**settings, **own})
        return self._admin

    def _forget_refusals(self) -> None:
        """Forget what brokers said before this question: it explains no later outage."""
        if self._admin is not None:
            self._admin.poll(0)  # calls back for what has come since the last question
        self._refusal.take()

    def _give_up(self, error: Any) -> TidegateError:
        """Translate an error, and let the next question open a new client."""
        if self._admin is not None:
            self._admin.poll(0)  # the client tells why it gave up
        self._admin = None
        return translate_client_error(self._refusal.take() or error.args[0], self._kafka)


class RangeReader:
    """Reads offset ranges of one topic; keeps its connections from one epoch to the next.

    Args:
        source: the source's name, for errors.
        kafka: its options.
        settings: what `translate_settings` returned for them.

    Raises:
        ConfigurationError: the library refuses the settings.
    """

    def __init__(self, source: str, kafka: KafkaOptions, settings: _Settings) -> None:
        from confluent_kafka import Consumer, KafkaException

        self._source, self._kafka, self._refusal = source, kafka, Refusal()
        own = {**_READER_SETTINGS, "error_cb": self._refusal.note_error}
        try:
            self._consumer = Consumer({**settings, **own})
        except KafkaException as error:
            raise translate_client_error(error.args[0], kafka) from error

    def read_ranges(self, ranges: Mapping[int, tuple[int, int]]) -> Generator[pa.RecordBatch]:
        """Yield the messages of partition -> (first offset, end), each partition's in order.

        Offsets that compaction or transactions left empty are not in the batches. Without a column
        for it, the timestamp is null.

        Raises:
            TransientError: the brokers do not answer, or messages of a range were removed.
            ConfigurationError: the brokers refuse this client.
        """
        from confluent_kafka import KafkaException, TopicPartition

        topic = self._kafka.topic
        positions = {partition: start for partition, (start, end) in ranges.items() if end > start}
        # What brokers said before this range explains no later outage; `poll` calls back for it.
        self._consumer.poll(0)
        self._refusal.take()
        ends = np.zeros(max(ranges, default=0) + 1, dtype=np.int64)
        for partition in positions:
            ends[partition] = ranges[partition][1]
        try:
            self._consumer.assign([TopicPartition(topic, *place) for place in positions.items()])
            while positions:
                batch = self._read_batch(positions, sum(ends[p] - positions[p] for p in positions))
                for partition in [p for p in positions if positions[p] >= ends[p]]:
                    del positions[partition]
                    # Not `pause`: the first fetch after it may wait for a second.
                    self._consumer.incremental_unassign([TopicPartition(topic, partition)])
                inside = batch["offset"].to_numpy() < ends[batch["partition"].to_numpy()]
                yield batch if inside.all() else batch.filter(pa.array(inside))
        except KafkaException as error:
            raise translate_client_error(error.args[0], self._kafka) from error
        finally:
            self._consumer.unassign()

    def _read_batch(self, positions: dict[int, int], missing: int) -> pa.RecordBatch:
        """Wait for messages, return them and move the positions behind them."""
        deadline = time.monotonic() + _SILENCE_SECONDS
        # A call returns when it has so many messages, or after its time.
        while not (found := self._consumer.consume(min(missing, _MOST_MESSAGES), _CALL_SECONDS)):
            if time.monotonic() > deadline:
                if (refusal := self._refusal.take()) is not None:
                    raise translate_client_error(refusal, self._kafka)
                detail = f"nothing came for {_SILENCE_SECONDS:.0f} s"
                raise KAFKA_UNAVAILABLE(servers=self._kafka.servers, detail=detail)
        self._refusal.take()  # this broker answers again
        events: list[Any] = [message for message in found if message.error() is not None]
        batch = self._tabulate_messages(
            [message for message in found if message.error() is None] if events else found
        )
        partitions, offsets = batch["partition"].to_numpy(), batch["offset"].to_numpy()
        for partition in np.unique(partitions).tolist():
            if partition in positions:
                positions[partition] = int(offsets[partitions == partition][-1]) + 1
        for event in events:
            if self._is_end_of_partition(event) and event.partition() in positions:
                positions[event.partition()] = max(positions[event.partition()], event.offset())
        return batch

    def _tabulate_messages(self, messages: Sequence[Any]) -> pa.RecordBatch:
        times = [m.timestamp()[1] for m in messages] if self._kafka.timestamp is not None else None
        moments = pa.nulls(len(messages), pa.int64()) if times is None else _to_ticks(times)
        columns = [
            pa.array([message.key() for message in messages], pa.binary()),
            pa.array([message.value() for message in messages], pa.binary()),
            pa.array([message.partition() for message in messages], pa.int32()),
            pa.array([message.offset() for message in messages], pa.int64()),
            moments.cast(MESSAGE_SCHEMA.field("timestamp").type),
            self._tabulate_headers(messages),
        ]
        return pa.record_batch(columns, MESSAGE_SCHEMA)

    def _tabulate_headers(self, messages: Sequence[Any]) -> pa.Array:
        kind = MESSAGE_SCHEMA.field("headers").type
        if not self._kafka.headers:
            return pa.nulls(len(messages), kind)
        found = [
            [{"key": key, "value": value} for key, value in message.headers() or ()]
            for message in messages
        ]
        return pa.array(found, kind)

    def _is_end_of_partition(self, event: Any) -> bool:
        """Whether a message without a value tells that its partition has no more for now.

        Raises:
            TransientError, ConfigurationError: it tells of an error of its partition.
        """
        from confluent_kafka import KafkaError

        error = event.error()
        # The client asks for the coordinator of a group that it does not use, which these brokers
        # may refuse. What concerns the topic comes with a partition.
        if event.topic() is None or (event.partition() or 0) < 0:
            return False
        if error.code() == KafkaError._PARTITION_EOF:
            return True
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            what = f"messages of {self._kafka.topic} were removed"
            raise CHANGED_WHILE_READ(source=self._source, what=what)
        raise translate_client_error(error, self._kafka)

    def close(self) -> None:
        """Close the connections."""
        self._consumer.close()


def _to_ticks(times: Sequence[int]) -> Any:
    """Milliseconds in ticks; null where there are more than a column holds."""
    most = TICK_MAX // 1000
    return pa.array([time * 1000 if abs(time) <= most else None for time in times], pa.int64())


class Refusal:
    """The newest error of a login or a certificate, which a client tells to its callback only.

    A broker that restarts during a login looks like one that refuses it, so an answer that comes
    afterwards takes the error back.
    """

    def __init__(self) -> None:
        self._newest: Any = None

    def note_error(self, error: Any) -> None:
        """Keep an error if it says why brokers cannot be used."""
        if error.name() in ("_AUTHENTICATION", "_SSL"):
            self._newest = error

    def take(self) -> Any:
        """Return the error and forget it; None without one."""
        newest, self._newest = self._newest, None
        return newest


def translate_client_error(error: Any, kafka: KafkaOptions) -> TidegateError:
    """Return an error of librdkafka in tidegate's words."""
    name, detail = error.name(), error.str()
    if name in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"):
        entry = KAFKA_NO_TOPIC
    elif name.endswith("AUTHORIZATION_FAILED") or name in ("_AUTHENTICATION", "_INVALID_ARG"):
        entry = KAFKA_DENIED
    elif name == "_SSL":
        entry = KAFKA_CERTIFICATE
    else:
        entry, detail = KAFKA_UNAVAILABLE, f"{name}: {detail}"
    return entry(topic=kafka.topic, servers=kafka.servers, detail=detail)
