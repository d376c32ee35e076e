"""Ranges of topics, read by the process of a task."""

from __future__ import annotations

import os
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
from tests.spark.agreement import divide_finely, spec_of
from tidegate.checkpoints.local_store import LocalStore
from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.rows import topic_reading
from tidegate.jobs.rows.cut_division import divide_cut
from tidegate.jobs.rows.message_schemas import read_schemas
from tidegate.jobs.rows.topic_reading import (
    _find_settings,
    build_settings_variables,
    close_reader,
    remove_settings,
    require_settings,
)
from tidegate.jobs.rows.unit_reading import UnitAnswer, read_unit
from tidegate.jobs.sources.kafka_client import RangeReader
from tidegate.jobs.sources.topic_checks import require_readable_topics
from tidegate.jobs.spark import python_tasks
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
    (unit,) = divide_cut(spec, plan_cut(spec, bounds), {}, store)
    for name, value in build_settings_variables(spec, with_secrets=True).items():
        monkeypatch.setenv(name, value)
    order = replace(order_of(remove_settings(spec), store), schemas=read_schemas(spec))
    answer: UnitAnswer = pickle.loads(pickle.dumps(read_unit(order, unit).answer))
    return answer


def read_dead_letters(answer: UnitAnswer, folder: Path) -> list[dict[str, Any]]:
    """The dead letters of a task, by their offsets."""
    (letters,) = answer.dead.written
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
    answer = read_cut(spec, {0: (3, 10), 1: (0, 0), 2: (0, 2)}, tmp_path, monkeypatch)
    assert (answer.error, answer.left, answer.rows, answer.missing) == (None, None, 9, {})
    assert answer.read_bytes > 0
    assert [(p.index, str(p.survey.member), p.survey.rows) for p in answer.slices] == [
        (0, "a/0", 7),
        (2, "a/2", 2),
    ]


def test_several_tasks_share_a_range(
    broker: KafkaInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each offset is read once, at its own position."""
    divide_finely(monkeypatch)
    broker.send("t", 0, [message(n) for n in range(10)])
    spec, store = topic_spec(broker.servers, events={}), LocalStore(tmp_path)
    for name, value in build_settings_variables(spec, with_secrets=True).items():
        monkeypatch.setenv(name, value)
    units = divide_cut(spec, plan_cut(spec, {0: (2, 10)}), {}, store)
    assert len(units) > 3
    order = order_of(remove_settings(spec), store)
    kept = [read_unit(order, unit).kept for unit in units]
    assert [seq for rows in kept if rows is not None for seq in rows["_seq"].to_pylist()] == [
        *range(2, 10)
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
        for name, value in build_settings_variables(spec, with_secrets=True).items():
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


def test_messages_that_are_dead_are_letters(
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


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (message(1, n="x"), "n is no long: x"),
        (b'{"t": NaN}', "the message is not a JSON object"),
        (b'{"t": 1} {}', "t is no timestamp: 1"),
        (b" " + message(1, n=" 7") + b"{", None),
    ],
)
def test_odd_messages_are_read_one_by_one(
    broker: KafkaInProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    odd: bytes,
    reason: str | None,
) -> None:
    """They are rows or dead letters, and the others are read as always."""
    broker.send("t", 0, [message(1), odd, message(2)])
    answer = read_cut(topic_spec(broker.servers), {0: (0, 3)}, tmp_path, monkeypatch)
    assert (answer.error, answer.left, answer.rows) == (None, None, 3)
    letters = read_dead_letters(answer, tmp_path) if answer.dead.written else []
    assert [row["detail"] for row in letters] == [reason] * (reason is not None)


def test_protobuf_messages_are_read_with_the_schema_of_the_order(
    broker: KafkaInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Good, dead and odd ones."""
    schema = make_schema(k=FIELD.TYPE_STRING, n=FIELD.TYPE_INT64, v=FIELD.TYPE_STRING)
    (tmp_path / "row.desc").write_bytes(schema)
    kafka = {**PROTOBUF, "schema_file": f"{tmp_path}/row.desc"}
    spec = topic_spec(broker.servers, kafka=kafka)
    good, odd = (encode_row(schema, 1, n=2, v=text) for text in ("0.5", "many"))
    broker.send("t", 0, [good, b"\x0a\xff", None, odd])
    answer = read_cut(spec, {0: (0, 4)}, tmp_path, monkeypatch)
    assert (answer.error, answer.left, answer.rows) == (None, None, 4)
    letters = read_dead_letters(answer, tmp_path)
    assert [row["detail"] for row in letters] == [
        "the message is no shop.Row",
        "a tombstone: the message has no value",
        "v is no double: many",
    ]
    assert '"_text":"0x0AFF"' in letters[0]["row"]
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
    options, value = build_settings_variables(spec, with_secrets=True).items()
    assert value == ("CLICKS_ID", "very secret")
    assert list(build_settings_variables(spec, with_secrets=False).items()) == [options]
    assert "very secret" not in options[1]
    shown = remove_settings(spec).sources["a"].kafka
    assert shown is not None
    assert shown.options == {}
    monkeypatch.setenv(*options)
    monkeypatch.setenv("CLICKS_ID", "of this host")
    assert _find_settings(remove_settings(spec), "a")["client.id"] == "of this host"
    objects = spec_of({"a": {}})
    assert build_settings_variables(objects, with_secrets=True) == {}
    assert remove_settings(objects) is objects


PROTOBUF = {"payload": "protobuf", "message": "shop.Row"}


def test_settings_through_spark_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan names variables that the hosts have. A secret in a spec is refused."""
    monkeypatch.setenv("CLIENT", "tests")
    far = {**OFF, "spark": {"master": "sc://far"}}
    spec = topic_spec("b:9092", kafka={"options": {"client.id": "env:CLIENT"}}, events=far)
    assert build_settings_variables(spec, with_secrets=True) == {}
    assert remove_settings(spec) == spec
    require_settings(spec)
    monkeypatch.delenv("CLIENT")
    with pytest.raises(ConfigurationError, match="CLIENT"):
        require_settings(spec)
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    login += ' username="u" password="p";'
    options = {"security.protocol": "SASL_PLAINTEXT", "sasl.jaas.config": login}
    spec = topic_spec("b:9092", kafka={"options": options}, events=far)
    with pytest.raises(ConfigurationError, match=r"kafka\.options\.sasl\.jaas\.config") as refused:
        require_readable_topics(spec, os.environ)
    assert refused.value.code == "kafka.literal_secret"
    require_readable_topics(topic_spec("b:9092", kafka={"options": options}), os.environ)


def test_variables_and_options_are_judged_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec that is only checked may name variables of another environment."""
    monkeypatch.setenv("SET", "x")
    options = {"client.id": "env:NOT_SET", "sasl.jaas.config": "env:NOT_SET"}
    spec = topic_spec("b:9092", kafka={"options": options})
    require_readable_topics(spec, None)
    with pytest.raises(ConfigurationError, match="NOT_SET is not set"):
        require_readable_topics(spec, os.environ)
    spec = topic_spec("b:9092", kafka={"options": {"receive.buffer.bytes": "env:SET"}})
    for environment in (None, os.environ):
        with pytest.raises(ConfigurationError, match=r"receive\.buffer\.bytes is no setting"):
            require_readable_topics(spec, environment)


@pytest.mark.parametrize(
    "options",
    [
        {"ssl.truststore.type": "PEM", "ssl.truststore.location": "env:FILE"},
        {"ssl.truststore.type": "env:TYPE", "ssl.truststore.location": "/etc/ca.pem"},
        {"ssl.keystore.type": "env:TYPE", "ssl.keystore.location": "env:FILE"},
        {"ssl.keystore.location": "env:FILE"},
        {"ssl.keystore.type": "env:TYPE"},
    ],
)
def test_variables_for_files_of_tls_are_not_refused(options: dict[str, str]) -> None:
    """A driver with these variables reads the topic."""
    spec = topic_spec("b:9092", kafka={"options": options})
    require_readable_topics(spec, None)
    require_readable_topics(spec, {"TYPE": "PEM", "FILE": "/etc/file.pem"})


def test_a_variable_does_not_hide_a_file_that_only_java_takes() -> None:
    """Whatever its value is."""
    options = {"ssl.truststore.type": "JKS", "ssl.truststore.location": "env:FILE"}
    spec = topic_spec("b:9092", kafka={"options": options})
    for environment in (None, {"FILE": "/etc/ca.jks"}):
        with pytest.raises(ConfigurationError, match=r"ssl\.truststore\.location is no setting"):
            require_readable_topics(spec, environment)


def test_workers_of_a_classic_master_look_for_their_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that could read no topic is refused at its start, with the missing variable."""
    monkeypatch.setattr(python_tasks, "prepare_worker", lambda: None)
    monkeypatch.setenv("CLIENT", "tests")
    spec = topic_spec("b:9092", kafka={"options": {"client.id": "env:CLIENT"}}, events=OFF)
    for name, value in build_settings_variables(spec, with_secrets=False).items():
        monkeypatch.setenv(name, value)
    plan = remove_settings(spec)
    assert list(python_tasks._import_kernel([], plan, iter([1]))) == []
    monkeypatch.delenv("CLIENT")
    with pytest.raises(ConfigurationError, match="CLIENT"):
        list(python_tasks._import_kernel([], plan, iter([1])))
