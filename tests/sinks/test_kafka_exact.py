"""The Kafka sink with transactions, against a model of what a broker keeps.

Every epoch once, whatever is lost in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.servers.memory_store import MemoryStore
from tests.sinks.conftest import UID, World, make_spec

from tidegate.errors import ConfigurationError, PoisonError, TransientError
from tidegate.jobs.sinks.factory import make_sinks
from tidegate.jobs.sinks.kafka_sink import ExactlyOnceKafkaSink, KafkaClientError, KafkaMessage
from tidegate.jobs.spec.operations import KafkaSinkSpec

TO = {"servers": "b:9092", "topic": "{table}", "tables": ["events"]}
GIVEN: dict[str, Any] = {"kind": "kafka", "delivery": "exactly_once", **TO}


class Broker:
    """What is committed, the ledger, and which producer is the newest."""

    def __init__(self) -> None:
        self.committed: list[KafkaMessage] = []
        self.ledger: str | None = None
        self.newest = 0


class Client:
    """Implements `Transactions`.

    `answers` are codes of what goes wrong with the next commits, "lost:" ones after the fact.
    """

    def __init__(self, broker: Broker, *answers: str) -> None:
        self.broker, self.answers, self.own = broker, list(answers), 0

    def acquire_ledger(self) -> str | None:
        self.broker.newest += 1
        self.own = self.broker.newest
        return self.broker.ledger

    def commit_messages(self, messages: Iterable[KafkaMessage], ledger: str, number: int) -> None:
        found = list(messages)
        answer = self.answers.pop(0) if self.answers else ""
        if self.own != self.broker.newest:
            raise KafkaClientError("_FENCED", "a newer producer")
        if answer and not answer.startswith("lost:"):
            raise KafkaClientError(answer, "no")
        assert json.loads(ledger)["upto"] == number
        self.broker.committed += found
        self.broker.ledger = ledger
        if answer:
            raise KafkaClientError(answer.removeprefix("lost:"), "no answer")

    def close(self) -> None:
        """Nothing to let go of."""


def world() -> World:
    """An empty log of a pipeline with this sink."""
    return World(MemoryStore(), Path("/nowhere"), make_spec(sinks={"out": GIVEN}))


def sink(of: World, client: Client) -> ExactlyOnceKafkaSink:
    """A publisher's sink."""
    made = ExactlyOnceKafkaSink("out", KafkaSinkSpec.model_validate(GIVEN), of.spec, of.store, UID)
    made._client = client
    return made


def delivered(broker: Broker) -> list[str]:
    """The checkpoint ids of what is committed, in order, each run of them once.

    A restore is "restore".
    """
    found: list[str] = []
    for message in broker.committed:
        headers = dict(message.headers)
        name = headers.get("tidegate-epoch", b"restore").decode()
        found += [name] if found[-1:] != [name] else []
    return found


def test_a_crash_between_commit_and_copy() -> None:
    """The copy in the store is behind; the ledger tells, and nothing is sent again."""
    of, broker = world(), Broker()
    sealed = [str(of.seal().id) for _ in range(3)]
    first = sink(of, Client(broker))
    with (
        # The first move is that of the new ledger, the second that of the first epoch.
        patch.object(first, "move_position", side_effect=[None, KeyboardInterrupt]),
        pytest.raises(KeyboardInterrupt),
    ):
        first.follow(of.log)
    assert delivered(broker) == sealed[:1]
    assert sink(of, Client(broker)).follow(of.log) == 2
    assert delivered(broker) == sealed
    assert len(broker.committed) == 6


@pytest.mark.parametrize("answer", ["lost:_TIMED_OUT", "_TIMED_OUT"])
def test_an_answer_that_is_lost(answer: str) -> None:
    """Whether the transaction was committed or not, the next try finds out by opening again."""
    of, broker = world(), Broker()
    sealed = [str(of.seal().id) for _ in range(2)]
    publisher = sink(of, Client(broker, "", answer))
    with pytest.raises(TransientError, match="Kafka: no"):
        publisher.follow(of.log)
    publisher.follow(of.log)
    assert delivered(broker) == sealed
    assert len(broker.committed) == 4


def test_two_publishers() -> None:
    """The one that slept is fenced, looks at the ledger again, and adds what is missing."""
    of, broker = world(), Broker()
    sealed = [str(of.seal().id)]
    slept, awake = sink(of, Client(broker)), sink(of, Client(broker))
    slept.follow(of.log)
    sealed.append(str(of.seal().id))
    awake.follow(of.log)
    sealed.append(str(of.seal().id))
    assert slept.follow(of.log) == 1
    assert awake.follow(of.log) == 0
    assert delivered(broker) == sealed


def test_a_publisher_that_slept_needs_no_retired_epoch() -> None:
    """It knows its position from before; the copy in the store tells what another has done."""
    of, broker = world(), Broker()
    sealed = [str(of.seal().id)]
    slept, awake = sink(of, Client(broker)), sink(of, Client(broker))
    slept.follow(of.log)
    sealed.append(str(of.seal().id))
    awake.follow(of.log)
    sealed.append(str(of.seal().id))
    of.retire(2)
    assert slept.follow(of.log) == 1
    assert awake.follow(of.log) == 0
    assert delivered(broker) == sealed
    of.seal()
    of.seal()
    of.retire(4)
    with pytest.raises(PoisonError, match="needs slot 4, which was retired"):
        awake.follow(of.log)


def test_a_restore_is_announced_in_the_transaction_that_moves_the_ledger() -> None:
    """A notice of it, then the epochs of the new timeline."""
    of, broker = world(), Broker()
    first, second = of.seal(), of.seal()
    publisher = sink(of, Client(broker))
    publisher.follow(of.log)
    of.fork(first.id)
    third = of.seal()
    publisher.follow(of.log)
    assert delivered(broker) == [str(first.id), str(second.id), "restore", str(third.id)]
    assert json.loads(broker.ledger or "") == {"timeline": 1, "upto": 2}


def test_when_kafka_has_forgotten_the_group() -> None:
    """The copy in the store goes on from where it is."""
    of, broker = world(), Broker()
    of.seal()
    sink(of, Client(broker)).follow(of.log)
    broker.ledger = None
    second = of.seal()
    assert sink(of, Client(broker)).follow(of.log) == 1
    assert delivered(broker)[-1] == str(second.id)
    assert len(broker.committed) == 4


def test_epochs_without_rows_are_only_marked() -> None:
    """Nothing is sent for them, not even a ledger.

    A publisher that comes later goes on behind them, though they were retired.
    """
    of, broker = world(), Broker()
    of.seal()
    publisher = sink(of, Client(broker))
    publisher.follow(of.log)
    empty = of.seal(tables=("late",))
    assert publisher.follow(of.log) == 1
    assert json.loads(broker.ledger or "")["upto"] == 1
    last = of.seal()
    of.retire(empty.slot)
    assert sink(of, Client(broker)).follow(of.log) == 1
    assert delivered(broker)[-1] == str(last.id)


def test_asking_for_the_lag_fences_no_driver() -> None:
    """The lag follows from the copy in the store."""
    of, broker = world(), Broker()
    of.seal()
    publisher = sink(of, Client(broker))
    publisher.follow(of.log)
    of.seal()
    assert sink(of, Client(broker)).lag(of.log) == 1
    assert broker.newest == 1


def test_a_user_who_may_not_write_learns_what_to_correct() -> None:
    """Refused credentials are the user's to mend; nothing is marked."""
    of, broker = world(), Broker()
    of.seal()
    with pytest.raises(ConfigurationError, match="Kafka: no"):
        sink(of, Client(broker, "TOPIC_AUTHORIZATION_FAILED")).follow(of.log)
    assert sink(of, Client(broker)).follow(of.log) == 1


def test_a_message_that_is_too_large() -> None:
    """No waiting mends it."""
    of = world()
    of.seal()
    with pytest.raises(ConfigurationError, match="a row is too large for a message") as caught:
        sink(of, Client(Broker(), "MSG_SIZE_TOO_LARGE")).follow(of.log)
    assert caught.value.code == "sink.too_large"


def test_the_spec_chooses(tmp_path: Path) -> None:
    """`delivery: exactly_once` makes this sink, and opens nothing yet."""
    of = world()
    (found,) = (
        one for one in make_sinks(of.spec, of.store, UID) if isinstance(one, ExactlyOnceKafkaSink)
    )
    assert found.lag(of.log) == 0
