"""Odd messages are decoded one by one by the tasks that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.rows.topic_inputs import FIELD, encode_row, make_schema, message, plan_cut, topic_spec
from tests.servers.kafka_in_process import KafkaInProcess
from tests.spark.agreement import COLUMNS
from tests.spark.topic_epochs import read_rows, run_epoch
from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.rows import cut_division
from tidegate.jobs.spec.pipeline import PipelineSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
EVENTS = {"release": {"mode": "pass_through"}, "outputs": {}}


def count_rows(
    session: SparkSession, folder: Path, spec: PipelineSpec, bounds: dict[int, tuple[int, int]]
) -> tuple[int, int]:
    """Read a cut; return the numbers of events and dead letters."""
    _, moved = run_epoch(spec, session, folder, plan_cut(spec, bounds))
    events, letters = (
        read_rows(moved, folder, table, order) if table in moved.files else []
        for table, order in (("events", "position"), ("dead_letters", "_seq"))
    )
    assert moved.counters.read == len(events) + len(letters)
    return len(events), len(letters)


def test_odd_values_keys_and_headers(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several units: values of other types, nested ones, tombstones and texts that are none."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 300_000)
    broker = KafkaInProcess()
    odd: list[Any] = ["7", " 7", "x", 1.5, True, None, [1], {"a": 1}, "NaN", 1e300, "é", 2**63]
    values: list[bytes | None] = [message(n, v=n / 3) for n in range(20)]
    for value in odd:
        values += [json.dumps({**json.loads(message(5)), name: value}).encode() for name in "knv"]
    values += [b"{", b"\xff", None, b'{"t": NaN}', b"[]", message(1) + b" x"]
    for partition, header in enumerate((b"7", b" 7", b"x", b"\xff")):
        broker.send("t", partition, values, headers=[("size", header)])
    kafka = {"key": "who", "headers": {"size": "size"}}
    columns = {**COLUMNS, "who": "string", "size": "int"}
    spec = topic_spec(broker.servers, kafka=kafka, schema=columns, events=EVENTS)
    bounds = dict.fromkeys(range(4), (0, len(values)))
    events, letters = count_rows(session, tmp_path, spec, bounds)
    assert (events, letters) == (86, 162)


def test_decimals_of_protobuf(session: SparkSession, tmp_path: Path) -> None:
    """The texts of them have more digits than a double."""
    broker = KafkaInProcess()
    fields = {"k": FIELD.TYPE_STRING, "n": FIELD.TYPE_INT64, "price": FIELD.TYPE_STRING}
    schema = make_schema(**fields)
    (tmp_path / "row.desc").write_bytes(schema)
    prices = ["1.5", "0.12345678901234567890", "x", "1e3", "", " 7 ", "1" * 30]
    values = [encode_row(schema, 1, k="x", n=2, price=price) for price in prices]
    broker.send("t", 0, [*values, b"\x0a\xff", None])
    kafka = {"payload": "protobuf", "message": "shop.Row", "schema_file": f"{tmp_path}/row.desc"}
    columns = {**COLUMNS, "price": "decimal(38,20)"}
    spec = topic_spec(broker.servers, kafka=kafka, schema=columns, events=EVENTS)
    assert count_rows(session, tmp_path, spec, {0: (0, len(values) + 2)}) == (4, 5)


@pytest.mark.parametrize("wait", [False, True])
def test_schemas_that_cannot_be_used(session: SparkSession, tmp_path: Path, wait: bool) -> None:
    """They are dead letters, or the source waits for one and says where it is."""
    broker = KafkaInProcess()
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "5.avsc").write_text('"string"')
    broker.send("t", 0, [b"no number", b"\0\0\0\0\x05abc", b"\0\0\0\0\x09abc"])
    kafka: dict[str, Any] = {"payload": "avro", "registry": f"{tmp_path}/schemas"}
    kafka |= {"on_unknown_schema": "wait"} if wait else {}
    spec = topic_spec(broker.servers, kafka=kafka, events=EVENTS)
    if not wait:
        assert count_rows(session, tmp_path, spec, {0: (0, 3)}) == (0, 3)
        return
    for end, kind, words in (
        (2, ConfigurationError, r"schema 5 of .* cannot be used \(t partition 0, offset 1\)"),
        (3, TransientError, r"schema 9 is not known .*\(t partition 0, offset 2\)"),
    ):
        cut = plan_cut(spec, {0: (end - 1, end)})
        with pytest.raises(kind, match=words):
            run_epoch(spec, session, tmp_path / str(end), cut)
