"""Avro messages are decoded by Spark's Python tasks as Spark SQL decodes them, or left to it."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastavro
import pyarrow as pa
import pytest

from tests.rows.topic_inputs import plan_cut, topic_spec
from tests.servers.kafka_in_process import KafkaInProcess
from tests.spark.kafka_topics import rows as decode_in_spark
from tests.spark.kafka_topics import spec_of
from tests.spark.topic_epochs import at_utc, read_rows, run_epoch
from tidegate.jobs.rows.avro_messages import plan_avro_messages, read_avro_messages
from tidegate.jobs.rows.avro_records import is_readable_schema
from tidegate.jobs.sources.kafka_client import MESSAGE_SCHEMA
from tidegate.jobs.spec.pipeline import SourceSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

AT = int(datetime(2026, 3, 1, 10, tzinfo=UTC).timestamp())
TIME = {"type": "long", "logicalType": "timestamp-millis"}
NUMBERED = {"headers": {}, "timestamp": "at", "payload": "avro", "registry": "http://127.0.0.1:9"}


def make_schema(**fields: Any) -> bytes:
    """A record of these fields."""
    named = [{"name": name, "type": kind} for name, kind in fields.items()]
    return json.dumps({"type": "record", "name": "R", "fields": named}).encode()


def encode(schema: bytes, **values: Any) -> bytes:
    """A record without its schema."""
    physical = json.loads(schema, object_hook=drop_logical_type)
    found = BytesIO()
    fastavro.schemaless_writer(found, fastavro.parse_schema(physical), values)
    return found.getvalue()


def drop_logical_type(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a physical type."""
    return {name: held for name, held in attributes.items() if name != "logicalType"}


def decode_in_task(
    values: list[bytes], source: SourceSpec, schemas: dict[int, bytes]
) -> list[dict[str, Any]] | None:
    """The rows of messages; None if they are left to Spark SQL."""
    plan = plan_avro_messages(source)
    assert plan is not None
    if not all(is_readable_schema(schema, source) for schema in schemas.values()):
        return None
    sent = datetime(2026, 3, 1, 12, tzinfo=UTC)
    messages = [
        {"key": b"ann", "value": value, "partition": 0, "offset": place, "timestamp": sent}
        for place, value in enumerate(values)
    ]
    batch = pa.RecordBatch.from_pylist(messages, MESSAGE_SCHEMA)
    try:
        tables, others = read_avro_messages(batch, plan, source, schemas)
    except pa.ArrowException:
        return None
    if others.num_rows:
        return None
    rows: list[dict[str, Any]] = pa.concat_tables(tables).to_pylist()
    return rows


def compare(
    session: SparkSession, declared: str, values: list[tuple[Any, Any]], **more: Any
) -> list[Any]:
    """Let Spark and tasks decode (type, value), each a message; return those that tasks decode."""
    own: dict[str, Any] = {"schema": {"at": "timestamp", "v": declared}, **more}
    own["kafka"] = {"key": None, **NUMBERED}
    source = spec_of(**own)
    numbers: dict[bytes, int] = {}
    messages, decoded, found = [], [], []
    for kind, value in values:
        schema = make_schema(v=kind)
        number = numbers.get(schema, len(numbers))
        message = b"\0" + number.to_bytes(4, "big") + encode(schema, v=value)
        own_rows = decode_in_task([message], source, {number: schema})
        if own_rows is not None:
            numbers[schema] = number
            messages.append(message)
            decoded.append(value)
            found += own_rows
    known = {number: schema for schema, number in numbers.items()}
    wanted = decode_in_spark(session, messages, known, **own)
    for value, row, one in zip(decoded, wanted, found, strict=True):
        for name in ("v", "_why", "_text"):
            assert repr(at_utc(one[name])) == repr(at_utc(row[name])), (value, declared)
    return decoded


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    """A type that means more than its bytes."""
    return {"type": kind, "logicalType": name, **more}


DECIMAL = logical("bytes", "decimal", precision=6, scale=2)
ENUM = {"type": "enum", "name": "E", "symbols": ["BUY", "SELL"]}
FIXED = {"type": "fixed", "name": "F", "size": 2}
VALUES: list[tuple[Any, Any]] = [
    *(("boolean", True), ("int", 7), ("int", -(2**31)), ("long", 7), ("long", 2**31)),
    *(("long", 2**53 + 1), ("long", -(2**63)), ("float", 0.1), ("double", 0.1), ("double", 2.0)),
    *(("double", float("nan")), ("double", -0.0), ("double", float("inf")), ("bytes", b"\xff\0")),
    *((FIXED, b"ab"), (ENUM, "SELL"), (["null", ENUM], "BUY"), (["null", "long"], None)),
    *((["long", "null"], 7), (["string"], "x"), (["long", "string"], 7), (DECIMAL, b"\x05\x00")),
    *((DECIMAL, b"\xff"), (DECIMAL, b""), (DECIMAL, b"\x7f\xff\xff\xff"), (DECIMAL, b"\0\0\x05")),
    *((logical("int", "date"), 20_000), (logical("int", "date"), -500_000)),
    *((logical("int", "date"), 2**31 - 1), (TIME, AT * 1000 + 1), (TIME, -(10**14))),
    *((TIME, 2**62), (logical("long", "timestamp-micros"), AT * 10**6 + 1)),
    *((logical("long", "local-timestamp-millis"), AT * 1000), (logical("int", "time-millis"), 7)),
    *((logical("string", "uuid"), "2f1c9e0e-6b51-4d0e-8f1c-0d5d2a2f7b11"),),
    *(({"type": "array", "items": "int"}, [1]), ({"type": "map", "values": "long"}, {"a": 1})),
    *(("string", text) for text in ("", "7", " 7", "007", "-0", "+7", "7.5", "1.50", "1e3", "x")),
    *(("string", text) for text in ("2147483648", "99999", "9" * 40, "0." + "1" * 40, "true")),
    *(("string", text) for text in ("2026-03-01", "2026-02-30", "2026-03-01T10:00:00Z", "٧")),
]


@pytest.mark.parametrize(
    ("declared", "least"),
    [
        *(("int", 5), ("long", 8), ("float", 1), ("double", 6), ("boolean", 1), ("string", 15)),
        *(("binary", 2), ("date", 2), ("timestamp", 3), ("decimal(6,2)", 6), ("decimal(4,1)", 2)),
    ],
)
def test_values_are_those_of_spark(avro: SparkSession, declared: str, least: int) -> None:
    """Of each type in a column of each type, or the message is left to Spark SQL."""
    assert len(compare(avro, declared, VALUES)) >= least


def test_numbers_are_times_with_a_unit(avro: SparkSession) -> None:
    """And else they are not; the schema's own times have their unit."""
    numbers = [("long", AT), ("int", AT), (TIME, AT * 1000), ("long", 2**62)]
    assert compare(avro, "timestamp", numbers, parse={"timestamps": "s"}) == [AT, AT, AT * 1000]
    assert compare(avro, "timestamp", numbers) == [AT * 1000]


RICH = make_schema(
    n=["null", "long"],
    e=["null", ENUM],
    s="string",
    many={"type": "array", "items": "int"},
    by={"type": "map", "values": ["null", "string"]},
    b="boolean",
    inner={"type": "record", "name": "I", "fields": [{"name": "x", "type": ["null", "int"]}]},
)


def test_damaged_messages_are_those_of_spark(avro: SparkSession) -> None:
    """A message is cut, has other bytes or more of them; nested fields are passed over."""
    draw = random.Random(5)
    columns = {"at": "timestamp", "n": "long", "e": "string", "s": "string", "b": "boolean"}
    own: dict[str, Any] = {"schema": columns}
    own["kafka"] = {"key": None, **NUMBERED}
    good = encode(
        RICH, n=300, e="SELL", s="aé", many=[1, -70], by={"k": "v"}, b=True, inner={"x": 5}
    )
    bodies = [good, good + b"more", *(good[:end] for end in range(1, len(good)))]
    for _ in range(300):
        data = bytearray(good)
        for _ in range(draw.randint(1, 2)):
            data[draw.randrange(len(data))] = draw.choice([0, 1, 2, 3, 4, 127, 128, 255])
        bodies.append(bytes(data))
    messages = [b"\0\0\0\0\7" + body for body in bodies]
    wanted = decode_in_spark(avro, messages, {7: RICH}, **own)
    reasons = set()
    compared = 0
    for message, row in zip(messages, wanted, strict=True):
        found = decode_in_task([message], spec_of(**own), {7: RICH})
        if found is not None:
            for name in ("n", "e", "s", "b", "_why", "_text"):
                assert found[0][name] == row[name], message
            reasons.add(row["_why"])
            compared += 1
    assert reasons == {None, "the message is not a record of the schema"}
    assert compared > 60


@pytest.mark.parametrize("schema_id", [None, 7])
def test_tasks_read_the_messages_that_the_driver_reads(
    avro: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    schema_id: int | None,
) -> None:
    """Events, dead letters and counters are the same; the schema is a file of the driver."""
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
    _, by_spark = run_epoch(spec, avro, tmp_path / "spark", cut, by_spark=True)

    _, by_tasks = run_epoch(spec, avro, tmp_path / "tasks", cut)
    assert by_tasks.counters == by_spark.counters
    assert by_tasks.counters.dead_lettered > 4
    for table, order in (("events", "position"), ("dead_letters", "_seq")):
        found = read_rows(by_tasks, tmp_path / "tasks", table, order)
        assert found == read_rows(by_spark, tmp_path / "spark", table, order)
        assert found


@pytest.mark.parametrize("stranger", [None, "unknown", "odd"])
def test_a_registry_has_older_and_newer_schemas(
    avro: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stranger: str | None,
) -> None:
    """A column has an old name and came later; what tasks cannot use is decoded by Spark SQL."""
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
    found: list[list[Any]] = []
    for folder in (tmp_path / "spark", tmp_path / "tasks"):
        # Each has a folder of its own: what was fetched stays known to the process.
        (folder / "schemas").mkdir(parents=True)
        for number, schema in schemas.items():
            (folder / "schemas" / f"{number}.avsc").write_bytes(schema)
        spec = topic_spec(
            broker.servers,
            kafka={"payload": "avro", "registry": f"{folder}/schemas"},
            events=events,
            evolution={"renamed": {"key": "k"}},
        )
        cut = plan_cut(spec, {0: (0, len(values))})
        _, moved = run_epoch(spec, avro, folder, cut, by_spark=folder.name == "spark")
        tables = ("events", "position"), ("dead_letters", "_seq")
        found.append([moved.counters, *(read_rows(moved, folder, *one) for one in tables)])
    assert found[0] == found[1]
    assert {row["k"] for row in found[0][1]} == {"x", "y"}
    assert len(found[0][2]) == 1 + (stranger is not None)
