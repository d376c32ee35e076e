"""Topics are read and decoded by Spark's Python tasks; the driver only plans ranges."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.rows.topic_inputs import (
    FIELD,
    encode_row,
    make_schema,
    message,
    plan_cut,
    topic_spec,
)
from tests.servers.kafka_in_process import KafkaInProcess
from tests.spark.topic_epochs import read_events, read_rows, run_epoch
from tidegate.jobs.rows import cut_division
from tidegate.jobs.sources.errors import CHANGED_WHILE_READ

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.fixture
def broker() -> KafkaInProcess:
    return KafkaInProcess()


@pytest.mark.parametrize("bad", [False, True])
def test_tasks_read_topics(
    session: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broker: KafkaInProcess,
    bad: bool,
) -> None:
    """Surveys, counters and segments, of several units."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 600_000)
    draw = random.Random(1)
    values = [
        [message(draw.randint(0, 50), v=draw.random() / 3) for _ in range(200)] for _ in range(3)
    ]
    if bad:
        values[1][7:7] = [b"not json"]
    for partition, own in enumerate(values):
        broker.send("t", partition, own)
    spec = topic_spec(broker.servers)
    cut = plan_cut(spec, {partition: (0, len(own)) for partition, own in enumerate(values)})
    members, moved = run_epoch(spec, session, tmp_path, cut)
    assert [(str(one.member), one.rows, one.dead) for one in members] == [
        ("a/0", 200, 0),
        ("a/1", 200, int(bad)),
        ("a/2", 200, 0),
    ]
    assert (moved.counters.read, moved.counters.dead_lettered) == (600 + bad, bad)
    assert moved.segments


@pytest.mark.parametrize(
    ("mode", "where"),
    [
        ("ordered", "n > 3"),
        ("pass_through", "n > 3"),
        ("ordered", "abs(n) > 3"),  # Spark SQL evaluates it
    ],
)
def test_tasks_write_the_events_of_topics(
    session: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broker: KafkaInProcess,
    mode: str,
    where: str,
) -> None:
    """With the same positions, of messages that `where` keeps; a bad one is a dead letter."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 600_000)
    draw = random.Random(2)
    values = [[message(draw.randint(0, 50), v=draw.random()) for _ in range(200)] for _ in range(3)]
    values[1][7:7] = [b"not json"]
    for partition, own in enumerate(values):
        broker.send("t", partition, own)
    events = {"release": {"mode": mode}, "outputs": {}}
    spec = topic_spec(broker.servers, events=events, where=where)
    cut = plan_cut(spec, {partition: (0, len(own)) for partition, own in enumerate(values)})
    _, moved = run_epoch(spec, session, tmp_path, cut)
    assert moved.counters.dead_lettered == 1
    found = read_events(moved, tmp_path)
    assert [row["position"] for row in found] == list(range(len(found)))
    sent = [json.loads(value) for own in values for value in own if value != b"not json"]
    wanted = Counter(one["v"] for one in sent if one["n"] > 3)
    released = Counter(row["v"] for row in found)
    assert released == wanted if mode == "pass_through" else released <= wanted
    assert found


@pytest.mark.parametrize("schema_id", [None, 7])
def test_tasks_read_protobuf_messages(
    session: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broker: KafkaInProcess,
    schema_id: int | None,
) -> None:
    """The schema is a file of the driver; odd messages and dead letters are among them."""
    schema = make_schema(
        kind=FIELD.TYPE_STRING, k=FIELD.TYPE_STRING, n=FIELD.TYPE_INT32, v=FIELD.TYPE_DOUBLE
    )
    (tmp_path / "row.desc").write_bytes(schema)
    draw = random.Random(3)
    prefix = b"" if schema_id is None else b"\0\0\0\0\7\0"
    values: list[bytes | None] = [
        prefix + encode_row(schema, draw.randint(0, 50), k='x"é', v=draw.random())
        for _ in range(100)
    ]
    values[3:3] = [prefix + encode_row(schema, 4, 250_000_000, n=-5), None, b"\x0a\xff", b""]
    values[50:50] = [b"\0\0\0\0\x08\0abc", b"\0\0\0\0\7\2abc", prefix]
    broker.send("t", 0, values)
    kafka: dict[str, Any] = {"payload": "protobuf", "message": "shop.Row"}
    kafka |= {"schema_file": f"{tmp_path}/row.desc", "key": "who"}
    kafka |= {} if schema_id is None else {"schema_id": schema_id}
    events = {"release": {"mode": "pass_through"}, "outputs": {}}
    spec = topic_spec(broker.servers, kafka=kafka, events=events)
    cut = plan_cut(spec, {0: (0, len(values))})
    _, moved = run_epoch(spec, session, tmp_path, cut)
    assert len(read_events(moved, tmp_path)) == 101
    letters = read_rows(moved, tmp_path, "dead_letters", "_seq")
    assert len(letters) == moved.counters.dead_lettered == 6


@pytest.mark.parametrize("stranger", [False, True])
def test_schemas_of_a_registry_are_fetched_once_tasks_have_met_them(
    session: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broker: KafkaInProcess,
    stranger: bool,
) -> None:
    """Of several schemas; messages with one that the registry does not know are dead letters."""
    fields = {"k": FIELD.TYPE_STRING, "n": FIELD.TYPE_INT64}
    older, newer = make_schema(**fields), make_schema(v=FIELD.TYPE_DOUBLE, **fields)
    values = [
        bytes([0, 0, 0, 0, number, 0]) + encode_row(schema, second, k="x", n=second)
        for second in range(20)
        for number, schema in ((5, older), (6, newer))
    ]
    values[7:7] = [b"no number", *([b"\0\0\0\0\x09\0abc"] if stranger else [])]
    broker.send("t", 0, values)
    events = {"release": {"mode": "pass_through"}, "outputs": {}}
    (tmp_path / "schemas").mkdir()
    for number, schema in ((5, older), (6, newer)):
        (tmp_path / "schemas" / f"{number}.desc").write_bytes(schema)
    kafka = {"payload": "protobuf", "message": "shop.Row", "registry": f"{tmp_path}/schemas"}
    spec = topic_spec(broker.servers, kafka=kafka, events=events)
    cut = plan_cut(spec, {0: (0, len(values))})
    _, moved = run_epoch(spec, session, tmp_path, cut)
    assert len(read_events(moved, tmp_path)) == 40
    letters = read_rows(moved, tmp_path, "dead_letters", "_seq")
    reasons = ["the message does not begin with the number of a schema"]
    words = "the message was written with schema 9, which the registry does not know"
    assert [row["detail"] for row in letters] == [*reasons, *[words] * stranger]


def test_removed_messages_end_the_attempt(
    session: SparkSession, tmp_path: Path, broker: KafkaInProcess
) -> None:
    """They are a transient error of the source, as in the driver, and no failed task."""
    broker.send("t", 0, [message(1)])
    spec = topic_spec(broker.servers)
    cut = plan_cut(spec, {0: (7, 9)})
    wanted: Exception = CHANGED_WHILE_READ(source="a", what="messages of t were removed")
    with pytest.raises(type(wanted), match=r"messages of t were removed"):
        run_epoch(spec, session, tmp_path, cut)
