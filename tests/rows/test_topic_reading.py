"""Ranges of topics, read by the process of a task."""

from __future__ import annotations

import json
import pickle
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.rows.topic_inputs import (
    FIELD,
    OFF,
    encode_row,
    make_schema,
    message,
    plan_cut,
    topic_spec,
)
from tests.rows.units import order_of
from tests.servers.kafka_in_process import KafkaInProcess
from tests.spark.agreement import COLUMNS, spec_of
from tidegate.checkpoints.local_store import LocalStore
from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.rows import topic_reading
from tidegate.jobs.rows.cut_division import divide_cut
from tidegate.jobs.rows.message_schemas import read_schemas
from tidegate.jobs.rows.task_support import explain_other_rows
from tidegate.jobs.rows.topic_reading import (
    build_settings_variable,
    close_reader,
    remove_settings,
    require_settings,
)
from tidegate.jobs.rows.unit_reading import UnitAnswer, read_unit
from tidegate.jobs.sources.kafka_client import RangeReader
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.source_options import KafkaOptions


@pytest.fixture
def broker() -> Iterator[KafkaInProcess]:
    yield KafkaInProcess()
    for pipeline in ("p", "q"):
        close_reader(pipeline, "a")


def read_cut(
    spec: PipelineSpec,
    bounds: dict[int, tuple[int, int]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> UnitAnswer:
    """What a task answers, as Spark sends it."""
    store = LocalStore(folder)
    (unit,) = divide_cut(plan_cut(spec, bounds), {}, store)
    for name, value in build_settings_variable(spec).items():
        monkeypatch.setenv(name, value)
    order = replace(order_of(remove_settings(spec), store), schemas=read_schemas(spec))
    answer: UnitAnswer = pickle.loads(pickle.dumps(read_unit(order, unit).answer))
    return answer


def read_dead_letters(answer: UnitAnswer, folder: Path) -> list[dict[str, Any]]:
    """The dead letters of a task, by their offsets."""
    (letters,) = answer.dead_files
    found = pq.read_table(folder / letters.key, partitioning=None).sort_by("_seq")
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def test_a_task_reads_the_planned_offsets(
    broker: KafkaInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several partitions, from the middle of one; keys and places come along."""
    broker.send("t", 0, [message(n) for n in range(10)])
    broker.send("t", 2, [message(30), message(31)])
    spec = topic_spec(broker.servers, kafka={"key": "who"})
    assert explain_other_rows(spec) is None
    answer = read_cut(spec, {0: (3, 10), 1: (0, 0), 2: (0, 2)}, tmp_path, monkeypatch)
    assert (answer.error, answer.left, answer.rows, answer.missing) == (None, None, 9, {})
    assert answer.read_bytes > 0
    assert [(p.index, str(p.survey.member), p.survey.rows) for p in answer.slices] == [
        (0, "a/0", 7),
        (2, "a/2", 2),
    ]


def test_pipelines_of_a_session_keep_their_own_settings(
    broker: KafkaInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sources may have the same name, and their tasks the same worker."""
    broker.send("t", 0, [message(n) for n in range(3)])
    first = topic_spec(broker.servers, kafka={"options": {"client.id": "first"}})
    second = topic_spec(broker.servers, kafka={"options": {"client.id": "second"}})
    second = second.model_copy(update={"name": "q"})
    used = []

    class NotedReader(RangeReader):
        """A client that says with which settings it was opened."""

        def __init__(self, name: str, kafka: KafkaOptions, settings: dict[str, Any]) -> None:
            used.append(settings["client.id"])
            super().__init__(name, kafka, settings)

    monkeypatch.setattr(topic_reading, "RangeReader", NotedReader)
    for spec in (first, second):
        for name, value in build_settings_variable(spec).items():
            monkeypatch.setenv(name, value)
    for spec in (first, second, first, second):
        found = topic_reading.read_topic_ranges(remove_settings(spec), plan_cut(spec, {0: (0, 3)}))
        assert [one.rows.num_rows for one in found.values()] == [3]
    assert used == ["first", "second"]


def test_offsets_without_a_message_are_counted(
    broker: KafkaInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compaction and transactions leave them."""

    class HalfReader(RangeReader):
        """Gives every second message, as of a compacted topic."""

        def read_ranges(self, ranges: Any) -> Generator[pa.RecordBatch]:
            for batch in super().read_ranges(ranges):
                yield batch.filter(pc.equal(pc.bit_wise_and(batch["offset"], 1), 0))

    monkeypatch.setattr(topic_reading, "RangeReader", HalfReader)
    broker.send("t", 0, [message(n) for n in range(5)])
    answer = read_cut(topic_spec(broker.servers), {0: (0, 5)}, tmp_path, monkeypatch)
    assert (answer.error, answer.rows) == (None, 3)
    assert answer.missing == {"@kafka/a/t/0/0-5": 2}


def test_messages_that_are_dead_for_certain_are_letters(
    broker: KafkaInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep their offsets, reasons and texts; the others are folded."""
    values = [message(1), b"not json", None, message(2, other=1), b"{", b"\xff", message(3)]
    broker.send("t", 0, values)
    answer = read_cut(topic_spec(broker.servers), {0: (0, 7)}, tmp_path, monkeypatch)
    assert (answer.error, answer.left, answer.rows) == (None, None, 7)
    found = read_dead_letters(answer, tmp_path)
    assert [(row["_seq"], row["detail"]) for row in found] == [
        (1, "the message is not a JSON object"),
        (2, "a tombstone: the message has no value"),
        (3, "not in the schema: other"),
        (4, "the message is not a JSON object"),
        (5, "the message is not UTF-8"),
    ]
    assert '"_text":"key key 2"' in found[1]["row"]
    (piece,) = answer.slices
    assert piece.survey.rows == 2


@pytest.mark.parametrize("odd", [message(1, n="x"), b'{"t": NaN}', b'{"t": 1} {}'])
def test_messages_that_arrow_does_not_read_are_left(
    broker: KafkaInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: bytes
) -> None:
    """Spark SQL reads such a cut."""
    broker.send("t", 0, [message(1), odd, message(2)])
    answer = read_cut(topic_spec(broker.servers), {0: (0, 3)}, tmp_path, monkeypatch)
    assert answer.left == "messages of source a that only Spark SQL reads"


def test_protobuf_messages_that_are_no_plain_values_are_left(
    broker: KafkaInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Good and dead ones are read with the schema that the order has, others by Spark SQL."""
    schema = make_schema(k=FIELD.TYPE_STRING, n=FIELD.TYPE_INT64, v=FIELD.TYPE_STRING)
    (tmp_path / "row.desc").write_bytes(schema)
    kafka = {**PROTOBUF, "schema_file": f"{tmp_path}/row.desc"}
    spec = topic_spec(broker.servers, kafka=kafka)
    assert explain_other_rows(spec) is None
    good, odd = (encode_row(schema, 1, n=2, v=text) for text in ("0.5", "many"))
    broker.send("t", 0, [good, b"\x0a\xff", None, odd])
    answer = read_cut(spec, {0: (0, 3)}, tmp_path / "good", monkeypatch)
    assert (answer.error, answer.left, answer.rows) == (None, None, 3)
    letters = read_dead_letters(answer, tmp_path / "good")
    assert [row["detail"] for row in letters] == [
        "the message is no shop.Row",
        "a tombstone: the message has no value",
    ]
    assert '"_text":"0x0AFF"' in letters[0]["row"]
    answer = read_cut(spec, {0: (0, 4)}, tmp_path / "odd", monkeypatch)
    assert answer.left == "messages of source a that only Spark SQL reads"
    (tmp_path / "row.desc").unlink()
    with pytest.raises(ConfigurationError, match=r"row\.desc cannot be read"):
        read_schemas(spec)


def test_removed_messages_are_a_transient_error(
    broker: KafkaInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No failure of the task; the client is opened anew for the next attempt."""
    broker.send("t", 0, [message(1)])
    answer = read_cut(topic_spec(broker.servers), {0: (7, 9)}, tmp_path, monkeypatch)
    assert isinstance(answer.error, TransientError)
    assert answer.error.code == "source.changed"
    assert ("p", "a") not in topic_reading._readers
    answer = read_cut(topic_spec(broker.servers), {0: (0, 1)}, tmp_path, monkeypatch)
    assert (answer.error, answer.rows) == (None, 1)


def test_settings_of_clients_are_in_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the environment of the workers."""
    monkeypatch.setenv("CLICKS_ID", "very secret")
    spec = topic_spec(
        "b:9092", kafka={"options": {"client.id": "env:CLICKS_ID", "client.rack": "r"}}
    )
    (variable,) = build_settings_variable(spec).values()
    assert json.loads(variable)["a"]["client.id"] == "very secret"
    shown = remove_settings(spec).sources["a"].kafka
    assert shown is not None
    assert shown.options == {}
    objects = spec_of({"a": {}})
    assert build_settings_variable(objects) == {}
    assert remove_settings(objects) is objects


PROTOBUF = {"payload": "protobuf", "message": "shop.Row"}
OTHER = "messages with columns that only Spark SQL decodes"


@pytest.mark.parametrize(
    ("kafka", "source", "reason"),
    [
        ({"headers": {"h": "from"}}, {}, OTHER),
        ({"payload": "avro", "schema_file": "a.avsc", "headers": {"h": "from"}}, {}, OTHER),
        (
            {**PROTOBUF, "schema_file": "row.desc"},
            {"schema": {**COLUMNS, "price": "decimal(6,2)"}},
            OTHER,
        ),
        ({"options": {"client.id": "env:NOT_SET"}}, {}, "settings that are not known"),
        ({"options": {"security.protocol": "SSL"}}, {}, "settings that only a JVM understands"),
    ],
)
def test_other_topics_are_named(
    kafka: dict[str, Any], source: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """With the reason."""
    spec = topic_spec("b:9092", kafka=kafka, **source)
    assert explain_other_rows(spec) == f"source a: {reason}"


def test_settings_through_spark_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan names variables that the hosts have. Spark SQL reads a topic with a secret in its spec."""
    monkeypatch.setenv("CLIENT", "tests")
    far = {**OFF, "spark": {"master": "sc://far"}}
    spec = topic_spec("b:9092", kafka={"options": {"client.id": "env:CLIENT"}}, events=far)
    assert explain_other_rows(spec) is None
    assert build_settings_variable(spec) == {}
    assert remove_settings(spec) == spec
    require_settings(spec)
    monkeypatch.delenv("CLIENT")
    with pytest.raises(ConfigurationError, match="CLIENT"):
        require_settings(spec)
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    login += ' username="u" password="p";'
    options = {"security.protocol": "SASL_PLAINTEXT", "sasl.jaas.config": login}
    spec = topic_spec("b:9092", kafka={"options": options}, events=far)
    found = explain_other_rows(spec)
    assert found == "source a: a plan of Spark Connect would show sasl.jaas.config"
