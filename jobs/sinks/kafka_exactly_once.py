"""A sink into Kafka topics, exactly once for readers of committed messages.

An epoch and the ledger are one transaction.

The ledger is the offset that a consumer group of the sink's own has committed, with the mark as its
metadata: Kafka moves it in the transaction. Opening a producer under the sink's name ends what an
older one has begun and fences it, so whoever opened last, and read the ledger afterwards, is the
only one that can move it; a commit whose answer was lost is settled by opening anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final, Protocol

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, TidegateError, TransientError
from tidegate.jobs.sinks.base_follower import (
    LedgerMovedError,
    SlotFollower,
    import_client_library,
    read_stored_position,
)
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
_TRANSACTION_SECONDS: Final = (
    300.0  # seconds for one transaction; brokers allow 900 unless told otherwise
)
_FENCED_CODES: Final = (
    "_FENCED",
    "PRODUCER_FENCED",
    "INVALID_PRODUCER_EPOCH",
    "INVALID_PRODUCER_ID_MAPPING",
)
_TOO_LARGE_CODES: Final = ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")
_REFUSED_CODES: Final = ("AUTHENTICATION", "AUTHORIZATION", "INVALID_ARG", "INVALID_CONFIG")


class KafkaClientError(Exception):
    """What Kafka said; `code` is librdkafka's name of it."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class TransactionalProducer(Protocol):
    """A transactional producer and its ledger. Each method raises RefusedError."""

    def acquire_ledger(self) -> str | None:
        """Fence older producers of the name, settle what they began.

        Returns the ledger, None before the first.
        """
        ...

    def commit_messages(self, messages: Iterable[KafkaMessage], ledger: str, number: int) -> None:
        """Messages and ledger in one transaction; returns when it is committed.

        `number` does not fall on one timeline.
        """
        ...

    def close(self) -> None:
        """Let go of the producer; an open transaction is left to the next one."""
        ...


class ExactlyOnceKafkaSink(SlotFollower):
    """Messages as `KafkaSink` writes them, in transactions.

    The mark in the store is a copy of the ledger.
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
        self._mark: FollowerPosition | None = None
        self._open = False

    def lag(self, log: SlotLog) -> int:
        """By the copy: to look at the ledger is to take it."""
        way, mark = CurrentLineage(log, log.head()), self._read_ledger_copy()
        return way.slot - (way.last_shared_slot(mark) if mark and way.is_in_log(mark) else 0)

    def _read_ledger_copy(self) -> FollowerPosition | None:
        found = read_stored_position(self.store, self.spec.name, self.name)
        if found is None:
            return None
        self.refuse_other_owner(found.uid)
        return found.position

    def _load_position(self) -> FollowerPosition | None:
        if not self._open:
            copy = self._read_ledger_copy()
            try:
                ledger = self._client.acquire_ledger()
            except KafkaClientError as error:
                raise self._translate_client_error(error) from error
            self._open = True
            # Both are true. The copy is the later one after epochs without rows, and where Kafka
            # has forgotten the group.
            known = [copy, None if ledger is None else FollowerPosition(**json.loads(ledger))]
            self._mark = max(
                (mark for mark in known if mark),
                key=lambda mark: (mark.timeline, mark.upto),
                default=None,
            )
        return self._mark

    def _create_ledger(self, log: SlotLog, way: CurrentLineage) -> FollowerPosition:
        first = FollowerPosition(way.timeline, way.slot if self._given.start == "head" else 0)
        self._commit_any_messages(
            (
                build_restore_messages(self, self._given, build_restore_notice(self, first, way))
                if way.timeline
                else iter(())
            ),
            first,
        )
        return first

    def _apply_epoch(
        self, epoch: Manifest, before: FollowerPosition, after: FollowerPosition
    ) -> None:
        self._commit_any_messages(build_row_messages(self, self._given, epoch), after)

    def _rewind_sink(
        self, before: FollowerPosition, after: FollowerPosition, way: CurrentLineage
    ) -> None:
        self._commit_any_messages(
            build_restore_messages(self, self._given, build_restore_notice(self, after, way)), after
        )

    def _handle_retired_epoch(
        self, slot: int, before: FollowerPosition, way: CurrentLineage
    ) -> FollowerPosition:
        raise self.epoch_retired_error(slot)

    def _commit_any_messages(
        self, messages: Iterator[KafkaMessage], after: FollowerPosition
    ) -> None:
        """One transaction.

        None where there is nothing to send, since a repetition of that sends nothing either.
        """
        first = next(messages, None)
        if first is not None:
            self._write_transaction(chain([first], messages), after)
        self._mark = after
        self.move_position(None, after)

    def _write_transaction(self, messages: Iterator[KafkaMessage], after: FollowerPosition) -> None:
        ledger = json.dumps({"timeline": after.timeline, "upto": after.upto})
        self._open = False  # whatever goes wrong, the ledger is asked again
        try:
            self._client.commit_messages(messages, ledger, after.upto)
        except KafkaClientError as error:
            self._client.close()
            if error.code in _FENCED_CODES:
                raise LedgerMovedError(
                    f"another publisher has the place of {self.name}", code="sink.moved"
                ) from error
            raise self._translate_client_error(error) from error
        self._open = True

    def _translate_client_error(self, error: KafkaClientError) -> TidegateError:
        what = f"sink {self.name} of {self.spec.name}: Kafka: {error}"
        if error.code in _TOO_LARGE_CODES:
            return message_too_large_error(self, str(error))
        if any(word in error.code for word in _REFUSED_CODES):
            return ConfigurationError(
                what,
                code="sink.refused",
                pipeline=self.spec.name,
                kept="everything sealed",
                advice=(
                    f"mend sinks.{self.name}.options (librdkafka's names), or the rights on topics,"
                    " group, transactional id"
                ),
            )
        return TransientError(
            what,
            code="sink.unavailable",
            pipeline=self.spec.name,
            kept="everything sealed; the sink catches up later",
            advice="bring the brokers back; tidegate tries again by itself",
            retry_after=1.0,
        )


class ConfluentProducer:
    """Implements `TransactionalProducer` with Confluent's client.

    Args:
        sink: its name, for errors.
        given: its options.
        name: of the transactional producer and of the group.
        topic: whose partition 0 stands for the ledger in the group.
    """

    def __init__(self, sink: str, given: KafkaSinkSpec, name: str, topic: str) -> None:
        self._sink, self._given, self._name, self._topic = sink, given, name, topic
        self._producer: Any = None
        self._group: Any = None

    def acquire_ledger(self) -> str | None:
        """Producer first: what it settles stands in the ledger that is read then."""
        kafka = self._import_confluent()
        own = {"log_level": 0, **build_sink_client_settings(self._given, self._sink)}
        try:
            limit = {"transaction.timeout.ms": int(_TRANSACTION_SECONDS * 1000)}
            producer = kafka.Producer({**limit, **own, "transactional.id": self._name})
            producer.init_transactions(_ANSWER_SECONDS)
            group = {
                "group.id": self._name,
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
            }
            consumer = kafka.Consumer({**own, **group})
            (found,) = consumer.committed(
                [kafka.TopicPartition(self._topic, 0)], timeout=_ANSWER_SECONDS
            )
            self._group = consumer.consumer_group_metadata()
            consumer.close()
        except kafka.KafkaException as error:
            raise _to_client_error(error) from error
        self._producer = producer
        return found.metadata if found.offset >= 0 else None

    def commit_messages(self, messages: Iterable[KafkaMessage], ledger: str, number: int) -> None:
        """Begin, produce, move the group, commit."""
        kafka = self._import_confluent()
        try:
            self._producer.begin_transaction()
            for message in messages:
                self._produce_message(message)
            place = kafka.TopicPartition(self._topic, 0, number, ledger)
            self._producer.send_offsets_to_transaction([place], self._group, _ANSWER_SECONDS)
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
        """Without waiting for anybody."""
        self._producer = self._group = None


def _to_client_error(error: Any) -> KafkaClientError:
    (cause,) = error.args
    return KafkaClientError(cause.name(), cause.str())
