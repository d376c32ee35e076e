"""A sink into Kafka topics, exactly once for readers of committed messages: an epoch and the ledger are one transaction.

The ledger is the offset that a consumer group of the sink's own has committed, with the mark as its metadata: Kafka moves it in
the transaction. Opening a producer under the sink's name ends what an older one has begun and fences it, so whoever opened last,
and read the ledger afterwards, is the only one that can move it; a commit whose answer was lost is settled by opening anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final, Protocol

from tidegate.checkpoints.log import SlotLog
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.store import Store
from tidegate.jobs.sinks.drivers import client_library
from tidegate.jobs.sinks.kafka_messages import Message, messages_of, notices_of, settings_of, too_large, topic_of
from tidegate.jobs.sinks.marks import Mark, Way
from tidegate.jobs.sinks.slots import MovedError, SlotFollower, read_mark
from tidegate.jobs.sinks.standard import notice
from tidegate.jobs.spec.errors import ConfigurationError, TidegateError, TransientError
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.sinks import KafkaSinkSpec

__all__ = ["ConfluentTransactions", "ExactKafkaSink", "RefusedError", "Transactions"]

_SECONDS: Final = 60.0  # for one answer; the drain of a driver has as many
_LONGEST: Final = 300.0  # seconds for one transaction; brokers allow 900 unless told otherwise
_FENCED: Final = ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "INVALID_PRODUCER_ID_MAPPING")
_TOO_LARGE: Final = ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")
_REFUSED: Final = ("AUTHENTICATION", "AUTHORIZATION", "INVALID_ARG", "INVALID_CONFIG")


class RefusedError(Exception):
    """What Kafka said; `code` is librdkafka's name of it."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Transactions(Protocol):
    """A transactional producer and its ledger. Each method raises RefusedError."""

    def open(self) -> str | None:
        """Fence older producers of the name, settle what they began; returns the ledger, None before the first."""
        ...

    def write(self, messages: Iterable[Message], ledger: str, number: int) -> None:
        """Messages and ledger in one transaction; returns when it is committed. `number` does not fall on one timeline."""
        ...

    def close(self) -> None:
        """Let go of the producer; an open transaction is left to the next one."""
        ...


class ExactKafkaSink(SlotFollower):
    """Messages as `KafkaSink` writes them, in transactions. The mark in the store is a copy of the ledger."""

    def __init__(
        self, name: str, given: KafkaSinkSpec, spec: PipelineSpec, store: Store, uid: str, client: Transactions | None = None
    ) -> None:
        super().__init__(name, spec, store, uid, given.tables)
        self._given = given
        self._client = client or ConfluentTransactions(name, given, f"tidegate-{uid}-{name}", topic_of(given, self.tables[0]))
        self._mark: Mark | None = None
        self._open = False

    def lag(self, log: SlotLog) -> int:
        """By the copy: to look at the ledger is to take it."""
        way, mark = Way(log, log.head()), self._copy()
        return way.slot - (way.position(mark) if mark and way.knows(mark) else 0)

    def _copy(self) -> Mark | None:
        found = read_mark(self.store, self.spec.name, self.name)
        if found is None:
            return None
        self.check_uid(found.uid)
        return found.mark

    def _load(self) -> Mark | None:
        if not self._open:
            copy = self._copy()
            try:
                ledger = self._client.open()
            except RefusedError as error:
                raise self._told(error) from error
            self._open = True
            # Both are true. The copy is the later one after epochs without rows, and where Kafka has forgotten the group.
            known = [copy, None if ledger is None else Mark(**json.loads(ledger))]
            self._mark = max((mark for mark in known if mark), key=lambda mark: (mark.timeline, mark.upto), default=None)
        return self._mark

    def _begin(self, log: SlotLog, way: Way) -> Mark:
        first = Mark(way.timeline, way.slot if self._given.start == "head" else 0)
        self._commit(notices_of(self, self._given, notice(self, first, way)) if way.timeline else iter(()), first)
        return first

    def _apply(self, epoch: Manifest, before: Mark, after: Mark) -> None:
        self._commit(messages_of(self, self._given, epoch), after)

    def _rewind(self, before: Mark, after: Mark, way: Way) -> None:
        self._commit(notices_of(self, self._given, notice(self, after, way)), after)

    def _past_retired(self, slot: int, before: Mark, way: Way) -> Mark:
        raise self.retired(slot)

    def _commit(self, messages: Iterator[Message], after: Mark) -> None:
        """One transaction; none where there is nothing to send, since a repetition of that sends nothing either."""
        first = next(messages, None)
        if first is not None:
            self._write(chain([first], messages), after)
        self._mark = after
        self.move_mark(None, after)

    def _write(self, messages: Iterator[Message], after: Mark) -> None:
        ledger = json.dumps({"timeline": after.timeline, "upto": after.upto})
        self._open = False  # whatever goes wrong, the ledger is asked again
        try:
            self._client.write(messages, ledger, after.upto)
        except RefusedError as error:
            self._client.close()
            if error.code in _FENCED:
                raise MovedError(f"another publisher has the place of {self.name}", code="sink.moved") from error
            raise self._told(error) from error
        self._open = True

    def _told(self, error: RefusedError) -> TidegateError:
        what = f"sink {self.name} of {self.spec.name}: Kafka: {error}"
        if error.code in _TOO_LARGE:
            return too_large(self, str(error))
        if any(word in error.code for word in _REFUSED):
            return ConfigurationError(
                what,
                code="sink.refused",
                pipeline=self.spec.name,
                kept="everything sealed",
                advice=f"mend sinks.{self.name}.options (librdkafka's names), or the rights on topics, group, transactional id",
            )
        return TransientError(
            what,
            code="sink.unavailable",
            pipeline=self.spec.name,
            kept="everything sealed; the sink catches up later",
            advice="bring the brokers back; tidegate tries again by itself",
            retry_after=1.0,
        )


class ConfluentTransactions:
    """Implements `Transactions` with Confluent's client.

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

    def open(self) -> str | None:
        """Producer first: what it settles stands in the ledger that is read then."""
        kafka = self._client()
        own = {"log_level": 0, **settings_of(self._given, self._sink)}
        try:
            limit = {"transaction.timeout.ms": int(_LONGEST * 1000)}
            producer = kafka.Producer({**limit, **own, "transactional.id": self._name})
            producer.init_transactions(_SECONDS)
            group = {"group.id": self._name, "enable.auto.commit": False, "isolation.level": "read_committed"}
            consumer = kafka.Consumer({**own, **group})
            (found,) = consumer.committed([kafka.TopicPartition(self._topic, 0)], timeout=_SECONDS)
            self._group = consumer.consumer_group_metadata()
            consumer.close()
        except kafka.KafkaException as error:
            raise _refused(error) from error
        self._producer = producer
        return found.metadata if found.offset >= 0 else None

    def write(self, messages: Iterable[Message], ledger: str, number: int) -> None:
        """Begin, produce, move the group, commit."""
        kafka = self._client()
        try:
            self._producer.begin_transaction()
            for message in messages:
                self._produce(message)
            place = kafka.TopicPartition(self._topic, 0, number, ledger)
            self._producer.send_offsets_to_transaction([place], self._group, _SECONDS)
            self._producer.commit_transaction(_LONGEST)
        except kafka.KafkaException as error:
            raise _refused(error) from error

    def _produce(self, message: Message) -> None:
        while True:
            try:
                self._producer.produce(message.topic, message.value, message.key, headers=message.headers)
                self._producer.poll(0)
            except BufferError:
                self._producer.poll(0.1)
            else:
                return

    def _client(self) -> Any:
        need = f"sinks.{self._sink}: delivery exactly_once"
        return client_library("confluent_kafka", of=need, package="confluent-kafka", extra="kafka")

    def close(self) -> None:
        """Without waiting for anybody."""
        self._producer = self._group = None


def _refused(error: Any) -> RefusedError:
    (cause,) = error.args
    return RefusedError(cause.name(), cause.str())
