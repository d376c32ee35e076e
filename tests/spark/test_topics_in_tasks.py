"""Topics are read and decoded by Spark's Python tasks; the driver only plans ranges."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
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
from tests.spark.kafka_topics import rows as decoded_rows
from tests.spark.kafka_topics import spec_of as messages_spec
from tests.spark.topic_epochs import at_utc, read_events, read_rows, run_epoch
from tidegate.jobs.rows import cut_division
from tidegate.jobs.rows.dead_messages import explain_dead_message, show_message
from tidegate.jobs.rows.protobuf_messages import plan_protobuf_messages, read_protobuf_messages
from tidegate.jobs.sources.errors import CHANGED_WHILE_READ
from tidegate.jobs.sources.kafka_client import MESSAGE_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.fixture
def broker() -> KafkaInProcess:
    return KafkaInProcess()


@pytest.mark.parametrize("bad", [False, True])
def test_tasks_read_what_the_driver_reads(
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
    by_spark = run_epoch(spec, session, tmp_path / "spark", cut, by_spark=True)

    by_tasks = run_epoch(spec, session, tmp_path / "tasks", cut)
    assert by_tasks[0] == by_spark[0]
    assert by_tasks[1].counters == by_spark[1].counters
    assert by_tasks[1].counters.dead_lettered == bad
    assert [(s.kind, s.rows) for s in by_tasks[1].segments] == [
        (s.kind, s.rows) for s in by_spark[1].segments
    ]


@pytest.mark.parametrize(
    ("mode", "where"),
    [
        ("ordered", "n > 3"),
        ("pass_through", "n > 3"),
        ("ordered", "abs(n) > 3"),  # Spark SQL evaluates it
    ],
)
def test_tasks_write_the_events_that_the_driver_writes(
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
    _, by_spark = run_epoch(spec, session, tmp_path / "spark", cut, by_spark=True)

    _, by_tasks = run_epoch(spec, session, tmp_path / "tasks", cut)
    assert by_tasks.counters == by_spark.counters
    assert by_tasks.counters.dead_lettered == 1
    found = read_events(by_tasks, tmp_path / "tasks")
    assert found == read_events(by_spark, tmp_path / "spark")
    assert [row["position"] for row in found] == list(range(len(found)))
    assert found


@pytest.mark.parametrize("schema_id", [None, 7])
def test_tasks_read_the_protobuf_messages_that_the_driver_reads(
    session: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broker: KafkaInProcess,
    schema_id: int | None,
) -> None:
    """Events, dead letters and counters are the same; the schema is a file of the driver."""
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
    _, by_spark = run_epoch(spec, session, tmp_path / "spark", cut, by_spark=True)

    _, by_tasks = run_epoch(spec, session, tmp_path / "tasks", cut)
    assert by_tasks.counters == by_spark.counters
    assert by_tasks.counters.dead_lettered > 2
    for table, order in (("events", "position"), ("dead_letters", "_seq")):
        found = read_rows(by_tasks, tmp_path / "tasks", table, order)
        assert found == read_rows(by_spark, tmp_path / "spark", table, order)
        assert found


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
    found: list[list[Any]] = []
    for folder in (tmp_path / "spark", tmp_path / "tasks"):
        # Each has a folder of its own: what was fetched stays known to the process.
        (folder / "schemas").mkdir(parents=True)
        for number, schema in ((5, older), (6, newer)):
            (folder / "schemas" / f"{number}.desc").write_bytes(schema)
        kafka = {"payload": "protobuf", "message": "shop.Row", "registry": f"{folder}/schemas"}
        spec = topic_spec(broker.servers, kafka=kafka, events=events)
        cut = plan_cut(spec, {0: (0, len(values))})
        _, moved = run_epoch(spec, session, folder, cut, by_spark=folder.name == "spark")
        tables = ("events", "position"), ("dead_letters", "_seq")
        found.append([moved.counters, *(read_rows(moved, folder, *one) for one in tables)])
    assert found[0] == found[1]
    assert len(found[0][1]) == 40
    assert len(found[0][2]) == 1 + stranger


ODD_TEXTS = [
    *("", " ", "5", " 5 ", "+5", "-5", "-0", "007", "5.0", "1e3", "1E400", "0x10", "5L", "5,6"),
    *("NaN", "inf", "-Infinity", ".5", "5.", "true", "TRUE", "t", "yes", "0", "1", "null", "x"),
    *("9223372036854775807", "9223372036854775808", "2147483648", "1.50", "0.1", "1e22", "５"),
    *("2026-03-01", "2026-3-1", "2026-03-01T10:00:00Z", "2026-03-01T10:00:00", "-0.0", "1_0"),
    *('5,"s":"x"', '"5"', "a\nb", "\\u0041", "\0", "𝄞", "1.7976931348623157e309", "4.9e-324"),
]


def test_values_of_protobuf_messages_are_those_of_spark(
    session: SparkSession, tmp_path: Path
) -> None:
    """Texts in columns of all types are read alike, or left to Spark SQL."""
    columns = {"i": "int", "l": "long", "d": "double", "b": "boolean", "s": "string"}
    columns |= {"day": "date", "at": "timestamp", "price": "decimal(6,2)"}
    fields = dict.fromkeys(columns, FIELD.TYPE_STRING)
    schema = make_schema(**fields)
    (tmp_path / "row.desc").write_bytes(schema)
    kafka = {"payload": "protobuf", "message": "shop.Row", "schema_file": f"{tmp_path}/row.desc"}
    own: dict[str, Any] = {
        "schema": {**columns, "t": "timestamp", "who": "string"},
        "event_time": "t",
    }
    more: dict[str, Any] = {"kafka": {"headers": {}, "timestamp": None, **kafka}, **own}
    texts: list[dict[str, Any]] = [{name: text} for name in columns for text in ODD_TEXTS]
    values = [encode_row(schema, 0, **one) for one in texts]
    source = messages_spec(**more)
    plan = plan_protobuf_messages(source)
    assert plan is not None
    wanted = decoded_rows(session, values, **more)
    compared = 0
    for row, value in zip(wanted, values, strict=True):
        batch = pa.RecordBatch.from_pylist(
            [{"key": b"ann", "value": value, "partition": 0, "offset": row["_at"]}], MESSAGE_SCHEMA
        )
        try:
            tables, others = read_protobuf_messages(batch, plan, source, {0: schema})
        except pa.ArrowException:  # Spark SQL reads it
            continue
        found = pa.concat_tables(tables).to_pylist()
        assert len(found) + others.num_rows == 1
        for one in found:
            shown = {name: at_utc(one[name]) for name in row}
            assert shown == {name: at_utc(held) for name, held in row.items()}, value
            compared += 1
    assert compared > 60


ODD: list[bytes | None] = [
    *(None, b"", b" ", b"null", b"7", b"[]", b'[{"n": 1}]', b"{}", b"{", b"}", b" {} {}"),
    *(b"\xff", b"{\xff}", b"\xef\xbb\xbf{}", b"\0\0\0\0\7{}", b"\0\0\0\0\7[]", b"\0{}"),
    *(b'{"n": 1,}', b"{'n': 1}", b'{"n": 01}', b'{"n": 1} x', b'{"x": 1, "x": 2, "y": 3}'),
    *(b'{"x": {"n": 1}}', b'{"N": 1}', b'{"n": {"x": NaN}}', b'{"n": "a\nb"}', b'{"x": "\\q"}'),
    *(b'{"": 1}', b'{"x": ' + b"[" * 100 + b"]" * 100 + b"}", b'{"n" 1}', b'{"n": -}', b"{1: 2}"),
    *(b"\x0b{}", b"\xc2\xa0{}", b'{"n": 1e}', b'{"n": tru}', b'{"n": "\\u12"}', b'{"n": .5}'),
]


@pytest.mark.parametrize("added", ["dead_letter", "ignore"])
def test_messages_that_are_dead_for_certain_are_so_in_spark(
    session: SparkSession, added: str
) -> None:
    """With the same reason and text, for odd messages and for damaged ones."""
    draw = random.Random(added)
    good = b'{"at": "2026-03-01T10:00:00Z", "n": 7, "price": 1.5}'
    damaged = []
    for _ in range(300):
        data = bytearray(good[: draw.choice([len(good), draw.randint(0, len(good))])])
        for _ in range(draw.randint(1, 3)):
            data[draw.randint(0, len(data)) : draw.randint(0, len(data))] = draw.choice(
                [b'"', b"{", b"}", b",", b":", b"\\", b" ", b"x", b"0", b"\xe4", b"\n"]
            )
        damaged.append(bytes(data[:200]))
    values = [*ODD, *damaged]
    evolution = {"added": added}
    source = messages_spec(evolution=evolution)
    reasons = [explain_dead_message(value, source) for value in values]
    found = decoded_rows(session, values, evolution=evolution)
    wanted = [row["_why"] for row in found]
    compared = [(v, r, w) for v, r, w in zip(values, reasons, wanted, strict=True) if r is not None]
    assert [(v, r) for v, r, _ in compared] == [(v, w) for v, _, w in compared]
    assert len(compared) > 100
    texts = [show_message(v, b"ann") for v, reason in zip(values, reasons, strict=True) if reason]
    assert texts == [
        row["_text"] for row, reason in zip(found, reasons, strict=True) if reason is not None
    ]


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
