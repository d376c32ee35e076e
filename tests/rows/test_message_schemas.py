"""Schemas of a registry: those that tasks lack, and those that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rows.avro_inputs import make_schema
from tests.rows.topic_inputs import topic_spec
from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.rows.message_schemas import fetch_schemas, read_schemas
from tidegate.jobs.sources.kafka_source import UnusableSchema
from tidegate.jobs.spec.pipeline import PipelineSpec


def make_spec(folder: Path, **kafka: Any) -> PipelineSpec:
    """A topic whose registry has schema 5, and 6 that is none."""
    schemas = folder / "schemas"
    schemas.mkdir()
    (schemas / "5.avsc").write_bytes(make_schema(n="long"))
    (schemas / "6.avsc").write_text('"string"')
    return topic_spec("b:9092", kafka={"payload": "avro", "registry": str(schemas), **kafka})


def test_tasks_get_the_schemas_that_they_lacked(tmp_path: Path) -> None:
    """One that is not there, or cannot be used, is known as such: tasks ask once for each."""
    spec = make_spec(tmp_path)
    known = read_schemas(spec)
    assert known == {"a": {}}
    known = fetch_schemas(spec, known, {"a": {5: "partition 0, offset 1", 9: "partition 0"}})
    assert known == {"a": {5: make_schema(n="long"), 9: None}}
    known = fetch_schemas(spec, known, {"a": {6: "partition 0, offset 7"}})
    assert known["a"].keys() == {5, 6, 9}
    unusable = known["a"][6]
    assert isinstance(unusable, UnusableSchema)
    assert unusable.why.startswith("no Avro record schema")
    # The registry may know it by the next epoch.
    assert read_schemas(spec)["a"].keys() == {5, 6}


def test_a_source_may_wait_for_a_schema(tmp_path: Path) -> None:
    """It says where a message with it is; one that cannot be used will never be another one."""
    spec = make_spec(tmp_path, on_unknown_schema="wait")
    with pytest.raises(TransientError, match=r"schema 9 is not known .*\(t partition 0\)"):
        fetch_schemas(spec, read_schemas(spec), {"a": {5: "partition 1", 9: "partition 0"}})
    for _ in range(2):
        assert 6 not in read_schemas(spec)["a"]
        with pytest.raises(ConfigurationError, match=r"schema 6 of .* cannot be used"):
            fetch_schemas(spec, read_schemas(spec), {"a": {6: "partition 0"}})


def test_an_unusable_schema_file_ends_the_driver(tmp_path: Path) -> None:
    """Before tasks read messages with it."""
    (tmp_path / "row.avsc").write_text('"string"')
    kafka = {"payload": "avro", "schema_file": f"{tmp_path}/row.avsc"}
    with pytest.raises(ConfigurationError, match="no Avro record schema"):
        read_schemas(topic_spec("b:9092", kafka=kafka))
