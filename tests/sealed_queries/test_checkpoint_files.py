"""Which files of a Spark checkpoint a sealed batch takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sealed_queries.fake_checkpoint import UID, FakeCheckpoint
from tidegate.errors import ConfigurationError
from tidegate.jobs.sealed_queries.checkpoint_files import (
    list_committed_batches,
    list_uncommitted_state,
    replace_schema_paths,
    select_restoring_files,
)


def _names(made: FakeCheckpoint, batch: int, prefix: str) -> set[str]:
    return {name for name in select_restoring_files(made.host, batch) if name.startswith(prefix)}


def test_what_later_batches_wrote_is_left_out(tmp_path: Path) -> None:
    """Also what a batch has begun that is not committed."""
    made = FakeCheckpoint(tmp_path, partitions=1)
    for batch in range(4):
        made.commit(batch)
    made.plan(4)
    made.write_state(5)
    assert list_committed_batches(made.host) == [0, 1, 2, 3]
    assert _names(made, 2, "offsets") | _names(made, 2, "commits") == {
        "offsets/1",
        "offsets/2",
        "commits/1",
        "commits/2",
    }
    assert _names(made, 2, "sources") == {"sources/0/0", "sources/0/1", "sources/0/2"}
    assert _names(made, 2, "state/0/0/") == {
        *(f"state/0/0/{version}.delta{end}" for version in (1, 2, 3) for end in ("", ".crc")),
        "state/0/0/_metadata/schema",
    }


def test_the_source_log_ends_where_the_offsets_of_the_batch_say(tmp_path: Path) -> None:
    """A batch without data has no entry, so the numbers drift; the next batch's entry is there."""
    made = FakeCheckpoint(tmp_path)
    made.commit(0)
    made.plan(1, {"logOffset": 0})  # only moves the watermark
    made.put("commits/1", "v1\n{}")
    made.put("sources/0/1", "files of batch 2, planned but not in its offsets")
    assert _names(made, 1, "sources") == {"sources/0/0"}


def test_a_compacted_source_log_replaces_what_is_before_it(tmp_path: Path) -> None:
    """Entries behind the compacted one are taken, those before are not."""
    made = FakeCheckpoint(tmp_path)
    for batch in range(5):
        made.commit(batch)
    made.put("sources/0/3.compact", "files up to 3")
    assert _names(made, 4, "sources") == {"sources/0/3.compact", "sources/0/4"}
    assert _names(made, 2, "sources") == {"sources/0/0", "sources/0/1", "sources/0/2"}


def test_the_initial_offsets_of_other_sources_are_always_taken(tmp_path: Path) -> None:
    """Kafka keeps one file, whose number is not that of a batch."""
    made = FakeCheckpoint(tmp_path)
    made.put("sources/0/0", "initial offsets")
    made.plan(7, {"topic": {"0": 12}})
    made.plan(6, {"topic": {"0": 9}})
    made.put("commits/7", "v1\n{}")
    assert _names(made, 7, "sources") == {"sources/0/0"}


def test_state_begins_at_the_newest_snapshot(tmp_path: Path) -> None:
    """Deltas before it restore nothing."""
    made = FakeCheckpoint(tmp_path, partitions=1)
    for batch in range(6):
        made.commit(batch, snapshot=batch == 3)
    assert {name for name in _names(made, 5, "state/0/0/") if name.endswith("delta")} == {
        "state/0/0/4.delta",
        "state/0/0/5.delta",
        "state/0/0/6.delta",
    }
    assert "state/0/0/1.delta" in _names(made, 2, "state")


def test_a_snapshot_of_rocksdb_brings_its_sst_files(tmp_path: Path) -> None:
    """And no SST of another version."""
    made = FakeCheckpoint(tmp_path, partitions=1, store="rocksdb")
    for batch in range(3):
        made.commit(batch)
    assert _names(made, 1, "state/0/0/") == {
        "state/0/0/2.zip",
        f"state/0/0/SSTs/000002-{UID}.sst",
        "state/0/0/_metadata/schema",
    }


def test_change_logs_are_taken_from_the_snapshot_before_the_newest(tmp_path: Path) -> None:
    """The newest may belong to an attempt that Spark never committed."""
    made = FakeCheckpoint(tmp_path, partitions=1, store="changelog")
    for batch in range(6):
        made.commit(batch, snapshot=batch in (1, 4))
    names = _names(made, 5, "state/0/0/")
    assert f"state/0/0/2_{UID}.zip" in names
    assert f"state/0/0/2_{UID}.changelog" in names
    assert f"state/0/0/1_{UID}.changelog" not in names


def test_state_of_an_uncommitted_batch_is_deleted(tmp_path: Path) -> None:
    """Otherwise its checksum file stays beside a new file (SPARK-56461). Its plan stays."""
    made = FakeCheckpoint(tmp_path, partitions=1)
    made.commit(0)
    made.plan(1)
    made.write_state(2)
    left = list_uncommitted_state(made.host)
    assert set(left) == {"state/0/0/2.delta", "state/0/0/2.delta.crc"}
    for path in left:
        made.host.delete(path)
    assert not list((tmp_path / "state/0/0").glob(".2*"))
    assert (tmp_path / "state/0/0/1.delta").exists()
    assert (tmp_path / "offsets/1").exists()


def test_an_unknown_format_is_not_sealed(tmp_path: Path) -> None:
    """A newer Spark may keep its offsets in another way."""
    made = FakeCheckpoint(tmp_path)
    made.commit(0)
    made.put("offsets/0", "v2\n{}\n{}")
    with pytest.raises(ConfigurationError, match="format v2"):
        select_restoring_files(made.host, 0)


def test_the_schemas_of_a_copy_are_those_in_it(tmp_path: Path) -> None:
    """Spark notes absolute paths of them, and the folder that a launch has left may be gone."""
    made = FakeCheckpoint(tmp_path)
    schema = "state/0/_stateSchema/default/0_1f"
    noted = json.dumps({"stateSchemaFilePaths": [f"file:/gone/q/{schema}"], "a": "/state/0/x"})
    path = made.put("state/0/_metadata/v2/0", f"v2\n{noted}")
    replace_schema_paths(made.folder, "s3a://bucket/launches/3/q")
    version, text = path.read_text().splitlines()
    assert version == "v2"
    assert json.loads(text) == {
        "stateSchemaFilePaths": [f"s3a://bucket/launches/3/q/{schema}"],
        "a": "/state/0/x",
    }
