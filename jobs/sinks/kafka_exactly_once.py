"""Writes into Kafka topics, exactly once for readers of committed messages.

The messages of an epoch and the ledger are one transaction. The ledger is the committed offset of a
consumer group that belongs to the sink, with the position as its metadata: Kafka moves it in the
transaction. Opening a producer under the sink's transactional id settles what an older producer
began and fences it. So only the publisher that opened last, and read the ledger after that, can
move it. A commit whose answer was lost is settled by opening the producer again.

See `docs/decisions/0077-kafka-transactions-use-librdkafka.md`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final, Protocol

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import TidegateError
from tidegate.jobs.sinks.base_follower import SlotFollower, import_client_library
from tidegate.jobs.sinks.errors import PRODUCER_FENCED, SINK_REFUSED, SINK_UNAVAILABLE
from tidegate.jobs.sinks.files_webhook import build_restore_notice
from tidegate.jobs.sinks.kafka_sink import (
    KafkaMessage,
    build_restore_messages,
    build_row_messages,
    build_sink_client_settings,
    message_too_large_error,
    resolve_topic,
)
from tidegate.jobs.sinks.lineage_position import CurrentLineage, FollowerPosition
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.sinks import KafkaSinkSpec

_ANSWER_SECONDS: Final = 60.0  # for one answer; the drain of a driver has as many
_TRANSACTION_SECONDS: Final = 300.0  # for one transaction; brokers allow 900 by default
_FENCED_CODES: Final = (
    "_FENCED",
    "PRODUCER_FENCED",
    "INVALID_PRODUCER_EPOCH",
    "INVALID_PRODUCER_ID_MAPPING",
)
# Names of errors in librdkafka that waiting does not cure.
_TOO_LARGE_CODES: Final = ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")
_REFUSED_CODES: Final = ("AUTHENTICATION", "AUTHORIZATION", "INVALID_ARG", "INVALID_CONFIG")


class KafkaClientError(Exception):
    """An error that Kafka reported; `code` is its name in librdkafka."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class TransactionalProducer(Protocol):
    """A transactional producer with its ledger. Each method raises `KafkaClientError`."""

    def acquire_ledger(self) -> str | None:
        """Fence older producers of the same name, settle their transactions, and read the ledger.

        Returns:
            The ledger; None before the first transaction.
        """
        ...

    def commit_messages(self, messages: Iterable[KafkaMessage], ledger: str, number: int) -> None:
        """Write messages and ledger in one transaction; return when it is committed.

        `number` becomes the offset of the ledger; it never decreases on one timeline.
        """
        ...

    def close(self) -> None:
        """Release the producer. The next producer settles a transaction that is still open."""
        ...


class ExactlyOnceKafkaSink(SlotFollower):
    """Writes the same messages as `KafkaSink`, in transactions.

    The position in the store is a copy of the ledger.
    """

    def __init__(
        self,
        name: str,
        given: KafkaSinkSpec,
        spec: PipelineSpec,
        store: Store,
        uid: str,
        client: TransactionalProducer | None = None,
    ) -> None:
        super().__init__(name, spec, store, uid, given.tables)
        self._given = given
        self._client = client or ConfluentProducer(
            name, given, f"tidegate-{uid}-{name}", resolve_topic(given, self.tables[0])
        )
        self._position: FollowerPosition | None = None
        self._open = False

    def lag(self, log: SlotLog) -> int:
        """Return the lag by the copy in the store.

        Reading the ledger would fence the running driver.
        """
        return CurrentLineage(log, log.head()).count_missing_slots(self.read_own_position())

    def _load_position(self) -> FollowerPosition | None:
        if not self._open:
            copy = self.read_own_position()
            try:
                ledger = self._client.acquire_ledger()
            except KafkaClientError as error:
                raise self._translate_client_error(error) from error
            self._open = True
            # Both are true. The copy is the later one after epochs without rows, and where Kafka
            # has forgotten the group.
            positions = [copy, None if ledger is None else FollowerPosition(**json.loads(ledger))]
            self._position = max(filter(None, positions), default=None)
        return self._position

    def _create_ledger(self, log: SlotLog, lineage: CurrentLineage) -> FollowerPosition:
        first = FollowerPosition(
            lineage.timeline, lineage.slot if self._given.start == "head" else 0
        )
        if lineage.timeline:
            self._rewind_sink(first, first, lineage)
        else:
            self._commit_any_messages(iter(()), first)
        return first

    def _apply_epoch(
        self, epoch: Manifest, before: FollowerPosition, after: FollowerPosition
    ) -> None:
        self._commit_any_messages(build_row_messages(self, self._given, epoch), after)

    def _rewind_sink(
        self, before: FollowerPosition, after: FollowerPosition, lineage: CurrentLineage
    ) -> None:
        notice = build_restore_notice(self, after, lineage)
        self._commit_any_messages(build_restore_messages(self, self._given, notice), after)

    def _handle_retired_epoch(
        self, slot: int, before: FollowerPosition, lineage: CurrentLineage
    ) -> FollowerPosition:
        raise self.epoch_retired_error(slot)

    def _commit_any_messages(
        self, messages: Iterator[KafkaMessage], after: FollowerPosition
    ) -> None:
        """Write one transaction, or none if there is nothing to send.

        Without messages, applying the epoch again sends nothing either.
        """
        first = next(messages, None)
        if first is not None:
            self._write_transaction(chain([first], messages), after)
        self._position = after
        self.move_position(None, after)

    def _write_transaction(self, messages: Iterator[KafkaMessage], after: FollowerPosition) -> None:
        ledger = json.dumps({"timeline": after.timeline, "upto": after.upto})
        self._open = False  # after any failure the ledger is read again
        try:
            self._client.commit_messages(messages, ledger, after.upto)
        except KafkaClientError as error:
            self._client.close()
            if error.code in _FENCED_CODES:
                raise PRODUCER_FENCED(pipeline=self.spec.name, sink=self.name) from error
            raise self._translate_client_error(error) from error
        self._open = True

    def _translate_client_error(self, error: KafkaClientError) -> TidegateError:
        cause = f"Kafka: {error}"
        if error.code in _TOO_LARGE_CODES:
            return message_too_large_error(self, str(error))
        if any(word in error.code for word in _REFUSED_CODES):
            remedy = (
                f"sinks.{self.name}.options (librdkafka's names), or the rights on topics, group,"
                " transactional id"
            )
            return SINK_REFUSED(pipeline=self.spec.name, sink=self.name, cause=cause, remedy=remedy)
        return SINK_UNAVAILABLE(
            pipeline=self.spec.name, sink=self.name, cause=cause, remedy="bring the brokers back"
        )


class ConfluentProducer:
    """Implements `TransactionalProducer` with Confluent's client.

    Args:
        sink: the sink's name, for errors.
        given: the sink's options.
        name: of the transactional producer and of the consumer group.
        topic: its partition 0 holds the ledger's offset in the group.
    """

    def __init__(self, sink: str, given: KafkaSinkSpec, name: str, topic: str) -> None:
        self._sink, self._given, self._name, self._topic = sink, given, name, topic
        self._producer: Any = None
        self._group: Any = None

    def acquire_ledger(self) -> str | None:
        """Open the producer before reading the ledger, so that the ledger shows what it settled."""
        kafka = self._import_confluent()
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
        """Begin, produce, move the group's offset, commit."""
        kafka = self._import_confluent()
        try:
            self._producer.begin_transaction()
            for message in messages:
                self._produce_message(message)
            offset = kafka.TopicPartition(self._topic, 0, number, ledger)
            self._producer.send_offsets_to_transaction([offset], self._group, _ANSWER_SECONDS)
            self._producer.commit_transaction(_TRANSACTION_SECONDS)
        except kafka.KafkaException as error:
            raise _to_client_error(error) from error

    def _produce_message(self, message: KafkaMessage) -> None:
        while True:
            try:
                self._producer.produce(
                    message.topic, message.value, message.key, headers=message.headers
                )
                self._producer.poll(0)
            # The client's queue is full: let it deliver, then try again.
            except BufferError:
                self._producer.poll(0.1)
            else:
                return

    def _import_confluent(self) -> Any:
        need = f"sinks.{self._sink}: delivery exactly_once"
        return import_client_library(
            "confluent_kafka", of=need, package="confluent-kafka", extra="kafka"
        )

    def close(self) -> None:
        """Drop the producer without waiting for open requests."""
        self._producer = self._group = None


def _to_client_error(error: Any) -> KafkaClientError:
    (cause,) = error.args
    return KafkaClientError(cause.name(), cause.str())
