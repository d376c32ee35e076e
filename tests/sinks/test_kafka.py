"""The Kafka sink's messages.

A row each, named, with its epoch; receivers can recognise repetitions and restores.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from tests.engine.harness import Bench, row, spec_of

from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.sinks.kafka_sink import KafkaSink
from tidegate.jobs.spec.operations import KafkaSinkSpec, add_connector_jars
from tidegate.jobs.spec.pipeline import PipelineSpec

GIVEN = KafkaSinkSpec(kind="kafka", servers="b:9092", topic="out.{table}", tables=("events",))


class Broker:
    """Keeps what it is sent; refuses while `away`."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.away = False
        self.says = "no one there"

    def __call__(self, messages: pa.Table, settings: dict[str, str]) -> None:
        assert settings == {"bootstrap.servers": "b:9092"}
        if self.away:
            raise OSError(self.says)
        self.messages += messages.to_pylist()


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
    assert {m["key"] for m in broker.messages} == {
        f"{e['_source']}/{e['_partition']}/{e['_seq']}" for e in events
    }
    assert sorted(json.loads(m["value"])["v"] for m in broker.messages) == sorted(
        e["v"] for e in events
    )
    headers = {header["key"]: header["value"].decode() for header in broker.messages[0]["headers"]}
    assert headers == {
        "tidegate-uid": "uid",
        "tidegate-epoch": str(world.epochs()[0].id),
        "tidegate-table": "events",
    }
    assert {m["topic"] for m in broker.messages} == {"out.events"}


def test_again_after_an_outage() -> None:
    """While the brokers are away nothing is marked; afterwards the epoch comes whole."""
    world, broker = bench(), Broker()
    broker.away = True
    with pytest.raises(TransientError, match="no one there"):
        sink(world, broker).follow(world.log)
    broker.away = False
    assert sink(world, broker).follow(world.log) == 1
    assert len(broker.messages) == len(world.rows("events"))


def test_a_message_that_is_too_large() -> None:
    """No waiting mends it: which settings to raise is said."""
    world, broker = bench(), Broker()
    broker.away = True
    broker.says = (
        "Job aborted\nCaused by: org.apache.kafka.common.errors.RecordTooLargeException: The"
        " message is 2000000 bytes"
    )
    with pytest.raises(ConfigurationError, match="The message is 2000000 bytes") as caught:
        sink(world, broker).follow(world.log)
    assert caught.value.code == "sink.too_large"


def test_connector_is_asked_for() -> None:
    """A pipeline with a Kafka sink gets Spark's connector, unless its own settings name jars."""
    plain = spec_of()
    raw = plain.model_dump(by_alias=True, exclude_unset=True) | {
        "sinks": {"out": GIVEN.model_dump()}
    }
    spec = PipelineSpec.model_validate(raw)
    assert "spark-sql-kafka" in add_connector_jars(spec).conf["spark.jars.packages"]
    assert add_connector_jars(plain) == plain.spark
    own = PipelineSpec.model_validate(raw | {"spark": {"conf": {"spark.jars": "mine.jar"}}})
    assert add_connector_jars(own).conf == {"spark.jars": "mine.jar"}
