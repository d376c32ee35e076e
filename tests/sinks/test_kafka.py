"""The Kafka sink's messages.

A row each, named, with its epoch; receivers can recognise repetitions and restores.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from tests.engine.harness import Bench, row, spec_of

from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.sinks.kafka_sink import KafkaClientError, KafkaMessage, KafkaSink
from tidegate.jobs.sources.topic_checks import require_readable_topics
from tidegate.jobs.spec.operations import KafkaSinkSpec, add_connector_jars, read_sink_variables
from tidegate.jobs.spec.pipeline import PipelineSpec

GIVEN = KafkaSinkSpec(kind="kafka", servers="b:9092", topic="out.{table}", tables=("events",))


class Broker:
    """Keeps what it is sent; answers with `refuses` while that is not empty."""

    def __init__(self) -> None:
        self.messages: list[KafkaMessage] = []
        self.refuses: tuple[str, str] | None = None

    def __call__(self, messages: Iterable[KafkaMessage], settings: dict[str, str]) -> None:
        assert settings == {"bootstrap.servers": "b:9092"}
        if self.refuses:
            raise KafkaClientError(*self.refuses)
        self.messages += messages


def bench() -> Bench:
    """One sealed epoch with released rows."""
    found = Bench(spec_of(release={"mode": "pass_through"}))
    engine = found.engine()
    for name in found.sources:
        found.sources[name].append(row(1, 10), row(2, 20))
    assert engine.run_epoch().sealed
    return found


def sink(of: Bench, broker: Broker) -> KafkaSink:
    """A sink of that log."""
    made = KafkaSink("out", GIVEN, of.spec, of.store, "uid")
    made._send = broker  # type: ignore[method-assign]
    return made


def test_a_message_per_row() -> None:
    """Each released row is a message with its place as key, its values as JSON and its epoch in a
    header; once, undisturbed.
    """
    world, broker = bench(), Broker()
    follower = sink(world, broker)
    assert follower.follow(world.log) == 1
    assert follower.follow(world.log) == 0
    events = world.rows("events")
    assert {m.key for m in broker.messages} == {
        f"{e['_source']}/{e['_partition']}/{e['_seq']}" for e in events
    }
    assert sorted(json.loads(m.value or "")["v"] for m in broker.messages) == sorted(
        e["v"] for e in events
    )
    assert dict(broker.messages[0].headers) == {
        "tidegate-uid": b"uid",
        "tidegate-epoch": str(world.epochs()[0].id).encode(),
        "tidegate-table": b"events",
    }
    assert {m.topic for m in broker.messages} == {"out.events"}


def test_again_after_an_outage() -> None:
    """While the brokers are away nothing is marked; afterwards the epoch comes whole."""
    world, broker = bench(), Broker()
    broker.refuses = "_TRANSPORT", "no one there"
    with pytest.raises(TransientError, match="no one there"):
        sink(world, broker).follow(world.log)
    broker.refuses = None
    assert sink(world, broker).follow(world.log) == 1
    assert len(broker.messages) == len(world.rows("events"))


def test_a_message_that_is_too_large() -> None:
    """No waiting mends it: which settings to raise is said."""
    world, broker = bench(), Broker()
    broker.refuses = "MSG_SIZE_TOO_LARGE", "Broker: Message size too large"
    with pytest.raises(ConfigurationError, match="Message size too large") as caught:
        sink(world, broker).follow(world.log)
    assert caught.value.code == "sink.too_large"


def test_it_needs_no_connector_of_spark() -> None:
    """Python tasks send the messages, so a Kafka sink brings no jars."""
    plain = spec_of()
    raw = plain.model_dump(by_alias=True, exclude_unset=True) | {
        "sinks": {"out": GIVEN.model_dump()}
    }
    assert add_connector_jars(PipelineSpec.model_validate(raw)) == plain.spark


def test_options_that_the_client_lacks() -> None:
    """A name of Java's client that librdkafka does not have ends the start, with the one to use."""
    raw = spec_of().model_dump(by_alias=True, exclude_unset=True)
    options = {"max.request.size": "5000000"}
    sinks = {"out": GIVEN.model_copy(update={"options": options}).model_dump()}
    spec = PipelineSpec.model_validate(raw | {"sinks": sinks})
    environments: tuple[dict[str, str] | None, ...] = ({}, None)
    for environment in environments:
        with pytest.raises(ConfigurationError, match=r"max\.request\.size") as caught:
            require_readable_topics(spec, environment)
        assert "message.max.bytes" in (caught.value.advice or "")


@pytest.mark.parametrize(
    "given",
    [
        GIVEN.model_copy(update={"options": {"sasl.password": "hunter2"}}).model_dump(),
        {"kind": "postgres", "url": "postgresql://me:hunter2@db/x"},
        {"kind": "webhook", "url": "https://example.org/?token=hunter2"},
    ],
)
def test_a_plan_of_spark_connect_shows_no_secret_of_a_sink(given: dict[str, Any]) -> None:
    """What a sink has would be in the plan, so a secret that is written out ends the start."""
    raw = spec_of().model_dump(by_alias=True, exclude_unset=True) | {"sinks": {"out": given}}
    require_readable_topics(PipelineSpec.model_validate(raw), {})
    spec = PipelineSpec.model_validate(raw | {"spark": {"master": "sc://far"}})
    with pytest.raises(ConfigurationError, match=r"sinks\.out\.") as caught:
        require_readable_topics(spec, {})
    assert "hunter2" not in str(caught.value)


def test_tasks_get_what_sinks_name() -> None:
    """Variables of addresses and options, of PostgreSQL's client and of certificates; no others."""
    sinks = {
        "a": {"kind": "postgres", "url": "postgresql://${WHO}@db/x"},
        "b": GIVEN.model_copy(update={"options": {"sasl.password": "env:PASS"}}).model_dump(),
        "c": {"kind": "files", "path": "s3://${PLACE:-here}/x"},
    }
    raw = spec_of().model_dump(by_alias=True, exclude_unset=True) | {"sinks": sinks}
    names = ("WHO", "PASS", "PLACE", "PGPASSWORD", "SSL_CERT_FILE", "HOME", "OTHER")
    found = read_sink_variables(PipelineSpec.model_validate(raw), dict.fromkeys(names, "x"))
    assert set(found) == {"WHO", "PASS", "PLACE", "PGPASSWORD", "SSL_CERT_FILE"}
