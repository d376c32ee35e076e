"""Writes into Kafka topics, at least once or exactly once for readers of committed messages.

Key: ``<source>/<partition>/<seq>`` for rows with provenance, otherwise none. Value: the row as
JSON. Headers: ``tidegate-epoch`` (the checkpoint id), ``tidegate-uid``, ``tidegate-table``. A
reader that remembers the pairs (epoch, key) it has seen gets each row once. A message without a
value and with a ``tidegate-restore`` header announces a restore, and says which epochs still count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TidegateError
from tidegate.jobs.engine.arrow_tables import list_rows
from tidegate.jobs.sources.kafka_client import Refusal, translate_settings
from tidegate.jobs.spec.operations import KafkaSinkSpec
from tidegate.jobs.spec.source_options import resolve_environment_values
from tidegate.json_types import JsonObject

from .base_follower import SlotFollower, import_client_library
from .errors import (
    LEDGER_MOVED,
    MESSAGE_TOO_LARGE,
    PRODUCER_FENCED,
    SINK_REFUSED,
    SINK_UNAVAILABLE,
)
from .files_webhook import AtLeastOnceSink
from .lineage_position import CurrentLineage, FollowerPosition
from .output_tables import IDENTITY_COLUMNS
from .published_tables import to_json_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PRODUCER_SETTINGS: dict[str, Any] = {
    "log_level": 0,
    "partitioner": "murmur2_random",  # the one of Java's client
    # Brokers that are away must not keep a task for longer.
    "message.timeout.ms": 120_000,
    # As much as Java's client holds: what waits too long in a longer queue would expire.
    "queue.buffering.max.kbytes": 32_768,
}
# As Java's client does, unless options that do not go with it are given.
_ORDERED_SETTINGS = {"enable.idempotence": True}
_UNORDERED_OPTIONS = (
    "acks",
    "enable.idempotence",
    "max.in.flight",
    "max.in.flight.requests.per.connection",
    "message.send.max.retries",
    "request.required.acks",
    "retries",
)
_QUESTION_SECONDS = 10.0
_MESSAGE_SCHEMA = pa.schema(
    {
        "topic": pa.string(),
        "key": pa.string(),
        "value": pa.string(),
        "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
    }
)


class KafkaClientError(Exception):
    """An error that Kafka reported; `code` is its name in librdkafka."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class KafkaSink(AtLeastOnceSink):
    """Sends a message per row to the topic of its table."""

    given: KafkaSinkSpec

    def _deliver_epoch(self, epoch: Manifest) -> None:
        self._send_all(build_row_messages(self, epoch))

    def _announce_restore(self, notice: JsonObject) -> None:
        self._send_all(build_restore_messages(self, notice))

    def _send_all(self, messages: Iterable[KafkaMessage]) -> None:
        settings = build_sink_client_settings(self.given, self.name)
        try:
            self._send(messages, settings)
        except KafkaClientError as error:
            raise translate_client_error(self, error) from error

    @staticmethod
    def _send(messages: Iterable[KafkaMessage], settings: dict[str, Any]) -> None:
        """Send messages with the client's settings; return when the brokers have them."""
        send_messages(messages, settings)


def send_messages(messages: Iterable[KafkaMessage], settings: Mapping[str, Any]) -> None:
    """Send messages, and return when the brokers have all of them.

    Args:
        messages: to send, in order.
        settings: of the client.

    Raises:
        KafkaClientError: brokers did not take a message; others may have arrived.
    """
    kafka = import_client_library("confluent_kafka", of="a sink of kind kafka", extra="kafka")
    ordered = {} if any(name in settings for name in _UNORDERED_OPTIONS) else _ORDERED_SETTINGS
    refusal, refused = Refusal(), list[Any]()

    def note_answer(error: Any, _message: Any) -> None:
        """Note that a message was not taken."""
        if error is not None:
            refused.append(error)

    try:
        own = {**_PRODUCER_SETTINGS, **ordered, "error_cb": refusal.note_error}
        producer = kafka.Producer({**own, **settings})
        asked = ""
        for message in messages:
            if message.topic != asked:
                # Brokers that are away are found at once, and not message by message.
                producer.list_topics(message.topic, timeout=_QUESTION_SECONDS)
                asked = message.topic
            send_message(producer, message, note_answer)
            if refused:
                break
        producer.flush()
    except kafka.KafkaException as error:
        # Why a login or a certificate was refused is told to the callback only.
        if (why := refusal.take()) is not None:
            raise KafkaClientError(why.name(), why.str()) from error
        raise _to_client_error(error) from error
    if refused:
        raise KafkaClientError(refused[0].name(), refused[0].str())


def send_message(
    producer: Any, message: KafkaMessage, on_delivery: Callable[[Any, Any], None] | None = None
) -> None:
    """Hand a message to a client's producer, and wait while its queue is full."""
    while True:
        try:
            producer.produce(
                message.topic,
                message.value,
                message.key,
                headers=message.headers,
                on_delivery=on_delivery,
            )
            producer.poll(0)
        # The client's queue is full: let it deliver, then try again.
        except BufferError:
            producer.poll(0.1)
        else:
            return


# Messages, shared with the exactly-once sink and with jobs.


class KafkaMessage(NamedTuple):
    """A record for a topic."""

    topic: str
    key: str | None
    value: str | None
    headers: list[tuple[str, bytes]]


def tabulate_messages(messages: Iterable[KafkaMessage]) -> pa.Table:
    """Return messages as the rows that Spark's Kafka sink takes."""
    rows = [
        m._asdict() | {"headers": [{"key": k, "value": v} for k, v in m.headers]} for m in messages
    ]
    return pa.Table.from_pylist(rows, schema=_MESSAGE_SCHEMA)


def write_messages(session: SparkSession, messages: pa.Table, options: Mapping[str, Any]) -> None:
    """Write messages with Spark's Kafka sink, and return when the broker has them.

    Args:
        session: has Kafka's connector.
        messages: of `tabulate_messages`.
        options: of the sink; those of Kafka's client begin with ``kafka.``.
    """
    frame = session.createDataFrame(messages)
    frame.write.format("kafka").options(**options).option("includeHeaders", "true").save()


def resolve_topic(given: KafkaSinkSpec, table: str) -> str:
    """Return the topic of a table's rows."""
    return given.topic.replace("{table}", table)


def build_sink_client_settings(given: KafkaSinkSpec, sink: str) -> dict[str, Any]:
    """Return the client's settings, with ``env:NAME`` values read from the environment.

    Raises:
        ConfigurationError: a variable is not set, or the client has no such setting.
    """
    options = resolve_environment_values(f"sinks.{sink}.options", given.options, os.environ)
    return translate_settings({"bootstrap.servers": given.servers, **options})


def build_row_messages(sink: SlotFollower, epoch: Manifest) -> Iterator[KafkaMessage]:
    """Yield a message for each row of an epoch, table by table."""
    for table in sink.tables:
        about = {"tidegate-epoch": str(epoch.id), "tidegate-table": table}
        headers, topic = _build_headers(sink.uid, about), resolve_topic(sink.given, table)
        for rows in sink.read_epoch_rows(epoch, table):
            for row in list_rows(rows):
                who = [row.get(name) for name in IDENTITY_COLUMNS]
                key = None if who[-1] is None else "/".join(map(str, who))
                yield KafkaMessage(topic, key, to_json_line(row), headers)


def build_restore_messages(sink: SlotFollower, notice: JsonObject) -> Iterator[KafkaMessage]:
    """Yield a message for each table that announces a restore in the table's topic."""
    for table in sink.tables:
        yield build_restore_message(resolve_topic(sink.given, table), notice)


def build_restore_message(topic: str, notice: JsonObject) -> KafkaMessage:
    """Return the message that announces a restore; `notice` is of `describe_restore`."""
    headers = _build_headers(notice["uid"], {"tidegate-restore": json.dumps(notice)})
    return KafkaMessage(topic, None, None, headers)


def _build_headers(uid: str, headers: dict[str, str]) -> list[tuple[str, bytes]]:
    return [(name, value.encode()) for name, value in {"tidegate-uid": uid, **headers}.items()]


# Exactly once. The messages of an epoch and the ledger are one transaction. The ledger is the
# committed offset of a consumer group that belongs to the sink, with the position as its metadata:
# Kafka moves it in the transaction. Opening a producer under the sink's transactional id settles
# what an older producer began and fences it. So only the publisher that opened last, and read the
# ledger after that, can move it. A commit whose answer was lost is settled by opening the producer
# again. See docs/decisions/0077-kafka-transactions-use-librdkafka.md.

_ANSWER_SECONDS = 60.0  # for one answer; the drain of a driver has as many
_TRANSACTION_SECONDS = 300.0  # for one transaction; brokers allow 900 by default
_FENCED_CODES = (
    "_FENCED",
    "PRODUCER_FENCED",
    "INVALID_PRODUCER_EPOCH",
    "INVALID_PRODUCER_ID_MAPPING",
)
# Names of errors in librdkafka that waiting does not cure.
_TOO_LARGE_CODES = ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")
_REFUSED_CODES = ("_SSL", "AUTHENTICATION", "AUTHORIZATION", "INVALID_ARG", "INVALID_CONFIG")


class ExactlyOnceKafkaSink(SlotFollower):
    """Writes the messages of `KafkaSink`; those of an epoch and the ledger are one transaction.

    An epoch without messages moves only the position in the store. At the start the later one of
    ledger and position counts.
    """

    given: KafkaSinkSpec

    def _set_up(self) -> None:
        producer, topic = (
            f"tidegate-{self.uid}-{self.name}",
            resolve_topic(self.given, self.tables[0]),
        )
        self._client: Any = ConfluentProducer(self.name, self.given, producer, topic)
        self._position: FollowerPosition | None = None
        self._known = False  # whether the ledger is at `_position`
        self._open = False  # whether this process has the newest producer, as far as it knows

    def lag(self, log: SlotLog) -> int:
        """Return the lag by the copy in the store.

        Reading the ledger would fence the running driver.
        """
        return CurrentLineage(log, log.head()).count_missing_slots(self.read_own_position())

    def _load_position(self) -> FollowerPosition | None:
        if not self._known:
            # Both are true. The copy is the later one after epochs without rows, and where Kafka
            # has forgotten the group.
            positions = [self.read_own_position(), self._acquire_ledger()]
            self._position = max(filter(None, positions), default=None)
            self._known = True
        return self._position

    def _acquire_ledger(self) -> FollowerPosition | None:
        """Open a producer, which fences all older ones, and then read the ledger."""
        try:
            ledger = self._client.acquire_ledger()
        except KafkaClientError as error:
            raise translate_client_error(self, error) from error
        self._open = True
        return None if ledger is None else FollowerPosition(**json.loads(ledger))

    def _create_ledger(self, lineage: CurrentLineage) -> FollowerPosition:
        self._position = super()._create_ledger(lineage)
        return self._position

    def _apply_epoch(
        self, epoch: Manifest, before: FollowerPosition, after: FollowerPosition
    ) -> None:
        self._known = False  # after any failure the ledger is read again
        if self._move_epoch(self._send_epoch, epoch, before, after) and self._open:
            self._client.close()  # the producer of the task has fenced it
            self._open = False
        self._note_position(after)

    def _send_epoch(
        self, epoch: Manifest, before: FollowerPosition, after: FollowerPosition
    ) -> None:
        self._commit_any_messages(build_row_messages(self, epoch), before, after)

    def _rewind_sink(
        self, before: FollowerPosition | None, after: FollowerPosition, lineage: CurrentLineage
    ) -> None:
        self._known = False
        notice = self.describe_restore(after, lineage)
        self._commit_any_messages(build_restore_messages(self, notice), before, after)
        self._note_position(after)

    def _note_position(self, after: FollowerPosition) -> None:
        self._position, self._known = after, True
        self.move_position(None, after)

    def _handle_retired_epoch(
        self, slot: int, before: FollowerPosition, lineage: CurrentLineage
    ) -> FollowerPosition:
        """Go on from the copy in the store, if another publisher has applied the epoch.

        This one remembers its position, and reading the ledger again would fence the other one.
        """
        copy = self.read_own_position()
        if copy is not None and copy > before:
            self._position = copy
            raise self.make_error(LEDGER_MOVED, position=copy, expected=before)
        return super()._handle_retired_epoch(slot, before, lineage)

    def _commit_any_messages(
        self,
        messages: Iterator[KafkaMessage],
        before: FollowerPosition | None,
        after: FollowerPosition,
    ) -> None:
        """Write one transaction, or none if there is nothing to send.

        Without messages, applying the epoch again sends nothing either.

        Raises:
            LedgerMovedError: another publisher has moved the ledger since it was at `before`.
        """
        first = next(messages, None)
        if first is None:
            return
        if not self._open:
            ledger = self._acquire_ledger()
            if ledger is not None and (before is None or ledger > before):
                raise self.make_error(LEDGER_MOVED, position=ledger, expected=before)
        self._write_transaction(chain([first], messages), after)

    def _write_transaction(self, messages: Iterator[KafkaMessage], after: FollowerPosition) -> None:
        ledger = json.dumps({"timeline": after.timeline, "upto": after.upto})
        self._open = False  # after any failure a producer is opened again
        try:
            self._client.commit_messages(messages, ledger, after.upto)
        except KafkaClientError as error:
            self._client.close()
            if error.code in _FENCED_CODES:
                raise self.make_error(PRODUCER_FENCED) from error
            raise translate_client_error(self, error) from error
        self._open = True


def translate_client_error(sink: SlotFollower, error: KafkaClientError) -> TidegateError:
    """Return tidegate's error for one of Kafka."""
    cause = f"Kafka: {error}"
    if error.code in _TOO_LARGE_CODES:
        return sink.make_error(MESSAGE_TOO_LARGE, cause=str(error)[:300])
    if any(word in error.code for word in _REFUSED_CODES):
        remedy = (
            f"sinks.{sink.name}.options (librdkafka's names), or the rights on topics, group,"
            " transactional id"
        )
        return sink.make_error(SINK_REFUSED, cause=cause, remedy=remedy)
    return sink.make_error(
        SINK_UNAVAILABLE,
        cause=cause,
        remedy="bring the brokers back, or correct the sink's options",
    )


@dataclass
class ConfluentProducer:
    """A transactional producer with its ledger. Each method raises `KafkaClientError`.

    Args:
        sink: the sink's name, for errors.
        given: the sink's options.
        name: of the transactional producer and of the consumer group.
        topic: its partition 0 holds the ledger's offset in the group.
    """

    _sink: str
    _given: KafkaSinkSpec
    _name: str
    _topic: str
    _producer: Any = None
    _group: Any = None

    def acquire_ledger(self) -> str | None:
        """Fence older producers of the same name, settle their transactions, and read the ledger.

        The producer is opened first, so that the ledger shows what it settled.

        Returns:
            The ledger; None before the first transaction.
        """
        need = f"sinks.{self._sink}: delivery exactly_once"
        kafka = import_client_library("confluent_kafka", of=need, extra="kafka")
        settings = {"log_level": 0, **build_sink_client_settings(self._given, self._sink)}
        try:
            limit = {"transaction.timeout.ms": int(_TRANSACTION_SECONDS * 1000)}
            producer = kafka.Producer({**limit, **settings, "transactional.id": self._name})
            producer.init_transactions(_ANSWER_SECONDS)
            group = {
                "group.id": self._name,
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
            }
            consumer = kafka.Consumer({**settings, **group})
            # The group's offset is in the transaction of the messages; its metadata is the ledger.
            (committed,) = consumer.committed(
                [kafka.TopicPartition(self._topic, 0)], timeout=_ANSWER_SECONDS
            )
            self._group = consumer.consumer_group_metadata()
            consumer.close()
        except kafka.KafkaException as error:
            raise _to_client_error(error) from error
        self._producer = producer
        return committed.metadata if committed.offset >= 0 else None

    def commit_messages(self, messages: Iterable[KafkaMessage], ledger: str, number: int) -> None:
        """Write messages and ledger in one transaction; return when it is committed.

        `number` becomes the offset of the ledger; it never decreases on one timeline.
        """
        from confluent_kafka import KafkaException, TopicPartition

        try:
            self._producer.begin_transaction()
            for message in messages:
                send_message(self._producer, message)
            offset = TopicPartition(self._topic, 0, number, ledger)
            self._producer.send_offsets_to_transaction([offset], self._group, _ANSWER_SECONDS)
            self._producer.commit_transaction(_TRANSACTION_SECONDS)
        except KafkaException as error:
            raise _to_client_error(error) from error

    def close(self) -> None:
        """Drop the producer without waiting for open requests.

        The next producer settles a transaction that is still open.
        """
        self._producer = self._group = None


def _to_client_error(error: Any) -> KafkaClientError:
    (cause,) = error.args
    return KafkaClientError(cause.name(), cause.str())
