"""Avro messages of a topic, read by Spark's Python tasks."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.rows.avro_inputs import AT, TIME, encode, make_schema
from tests.rows.topic_inputs import plan_cut, topic_spec
from tests.servers.kafka_in_process import KafkaInProcess
from tests.spark.topic_epochs import read_rows, run_epoch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.mark.parametrize("schema_id", [None, 7])
def test_tasks_read_avro_messages(
    session: SparkSession,
    tmp_path: Path,
    schema_id: int | None,
) -> None:
    """The schema is a file of the driver; damaged messages are dead letters."""
    broker = KafkaInProcess()
    schema = make_schema(t=TIME, k=["null", "string"], n="int", v="double")
    (tmp_path / "row.avsc").write_bytes(schema)
    draw = random.Random(3)
    prefix = b"" if schema_id is None else b"\0\0\0\0\7"
    values: list[bytes | None] = [
        prefix
        + encode(
            schema, t=(AT + draw.randint(0, 50)) * 1000, k=draw.choice(["é", None]), n=1, v=0.1
        )
        for _ in range(100)
    ]
    values[3:3] = [None, b"", prefix, b"\0\0\0\0\x08abc", b"\0\0\0\0\7\2", prefix + b"\2"]
    broker.send("t", 0, values)
    kafka: dict[str, Any] = {"payload": "avro", "schema_file": f"{tmp_path}/row.avsc"}
    kafka |= {"key": "who"} | ({} if schema_id is None else {"schema_id": schema_id})
    events = {"release": {"mode": "pass_through"}, "outputs": {}}
    spec = topic_spec(broker.servers, kafka=kafka, events=events)
    cut = plan_cut(spec, {0: (0, len(values))})
    _, moved = run_epoch(spec, session, tmp_path, cut)
    assert len(read_rows(moved, tmp_path, "events", "position")) == 100
    letters = read_rows(moved, tmp_path, "dead_letters", "_seq")
    assert [row["_seq"] for row in letters] == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("stranger", [None, "unknown", "odd"])
def test_a_registry_has_older_and_newer_schemas(
    session: SparkSession,
    tmp_path: Path,
    stranger: str | None,
) -> None:
    """A column has an old name and came later; others are unknown, or out of the ordinary."""
    broker = KafkaInProcess()
    older = make_schema(t=TIME, key="string", n="long")
    newer = make_schema(n="int", k=["null", "string"], t=TIME, v=["null", "double"], more="string")
    odd = make_schema(t=TIME, n=["int", "string"], k="string")
    schemas = {5: older, 6: newer, 8: odd}
    values = []
    for second in range(20):
        time = (AT + second) * 1000
        values.append(b"\0\0\0\0\5" + encode(older, t=time, key="x", n=second))
        values.append(b"\0\0\0\0\6" + encode(newer, t=time, k="y", n=second, v=0.1, more="z"))
    strangers = {
        "unknown": b"\0\0\0\0\x09abc",
        "odd": b"\0\0\0\0\x08" + encode(odd, t=AT * 1000, n=1, k="z"),
    }
    values[7:7] = [b"no number", *([strangers[stranger]] if stranger else [])]
    broker.send("t", 0, values)
    events = {"release": {"mode": "pass_through"}, "outputs": {}}
    (tmp_path / "schemas").mkdir()
    for number, schema in schemas.items():
        (tmp_path / "schemas" / f"{number}.avsc").write_bytes(schema)
    spec = topic_spec(
        broker.servers,
        kafka={"payload": "avro", "registry": f"{tmp_path}/schemas"},
        events=events,
        evolution={"renamed": {"key": "k"}},
    )
    _, moved = run_epoch(spec, session, tmp_path, plan_cut(spec, {0: (0, len(values))}))
    released = read_rows(moved, tmp_path, "events", "position")
    assert Counter(row["k"] for row in released) == {"x": 20, "y": 20}
    letters = read_rows(moved, tmp_path, "dead_letters", "_seq")
    reasons = {
        "unknown": ["the message was written with schema 9, which the registry does not know"],
        "odd": ['n is int or string, declared long: {"member0":1}'],
    }
    assert [row["detail"] for row in letters] == [
        "the message does not begin with the number of a schema",
        *(reasons[stranger] if stranger else []),
    ]
