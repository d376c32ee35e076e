"""Tables as sources.

Delta written by delta-rs, Iceberg by pyiceberg; each file once, in the order of the versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltalake
import pytest
from pyiceberg.table.metadata import TableMetadataV2
from tests.sources.lakes import Lake, rows

from tidegate.errors import ConfigurationError, PoisonError, TransientError
from tidegate.infra.local_processes import LOOPBACK, choose_free_port
from tidegate.jobs.spec.pipeline import PipelineSpec

# Delta


@pytest.fixture
def delta(tmp_path: Path) -> Lake:
    return Lake(tmp_path, format="delta")


def write(lake: Lake, *numbers: int, **more: Any) -> None:
    """Append to the Delta table."""
    deltalake.write_deltalake(str(lake.path), rows(*numbers), mode="append", **more)


def test_delta_by_versions(delta: Lake) -> None:
    """Each append's file comes once and behind the older ones.

    A fresh reader sees the same places.
    """
    write(delta, 1, 2)
    write(delta, 3)
    first, _, resume = delta.read()
    assert first == [[1, 2], [3]]
    write(delta, 0, 9)
    assert delta.read(resume)[0] == [[0, 9]]
    assert delta.read()[0] == [[1, 2], [3], [0, 9]]


def test_delta_compaction_brings_nothing(delta: Lake) -> None:
    """Files that only gather older rows are not read again, even by a reader that comes later.

    Appends behind are.
    """
    for n in range(4):
        write(delta, n)
    _, _, resume = delta.read()
    deltalake.DeltaTable(str(delta.path)).optimize.compact()
    write(delta, 7)
    assert delta.read(resume)[0] == [[7]]


def test_delta_partition_values(delta: Lake) -> None:
    """Values that are in the log and in the folders' names only are columns of the rows."""
    write(delta, 1, 2, 3, partition_by=["shop"])
    assert sorted(delta.read()[0]) == [[1, 3], [2]]


def test_delta_rewrite_is_refused(delta: Lake) -> None:
    """A version that deleted rows stops the source and is named; nothing behind it is read."""
    write(delta, 1, 2)
    deltalake.DeltaTable(str(delta.path)).delete("n = 1")
    with pytest.raises(PoisonError, match=r"version 1 of .*DELETE.* removed or changed rows"):
        delta.read()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_delta_may_begin_at_the_current_version(tmp_path: Path, checkpoint: bool) -> None:
    """What was deleted before the source was made does not matter to it.

    What the table holds comes at once.
    """
    lake = Lake(tmp_path, format="delta", start="current")
    write(lake, 1, 2)
    deltalake.DeltaTable(str(lake.path)).delete("n = 1")
    if checkpoint:
        deltalake.DeltaTable(str(lake.path)).create_checkpoint()
    write(lake, 3)
    deltalake.DeltaTable(str(lake.path)).optimize.compact()
    found, _, resume = lake.read()
    assert sorted(n for numbers in found for n in numbers) == [2, 3]
    write(lake, 4)
    assert lake.read(resume)[0] == [[4]]
    deltalake.DeltaTable(str(lake.path)).delete("n = 4")
    with pytest.raises(PoisonError, match="removed or changed rows"):
        lake.read(resume)


def test_delta_rewrite_is_a_dead_letter(tmp_path: Path) -> None:
    """With `on_rewrite.

    Skip` it is a dead letter at a place of its own, and what comes behind is read.
    """
    lake = Lake(tmp_path, format="delta", on_rewrite="skip")
    write(lake, 1, 2)
    deltalake.DeltaTable(str(lake.path)).delete("n = 1")
    write(lake, 3)
    found, dead, _ = lake.read()
    assert found == [[1, 2], [3]]
    assert dead == ["version 1 of the table (DELETE) took or changed rows, which is not followed"]


def commit(lake: Lake, version: int) -> Path:
    """The file of a version."""
    return lake.path / "_delta_log" / f"{version:020d}.json"


def test_delta_log_begins_late(delta: Lake) -> None:
    """When old commits are gone, a new reader begins with the files of the newest checkpoint.

    A known reader names the gap.
    """
    for n in range(4):
        write(delta, n)
    _, _, resume = delta.read()
    deltalake.DeltaTable(str(delta.path)).create_checkpoint()
    write(delta, 8)
    for version in range(4):
        commit(delta, version).unlink()
    assert delta.read(resume)[0] == [[8]]
    other = delta.path.parent / "other"
    other.mkdir()
    (other / "lake").symlink_to(delta.path)
    fresh = Lake(other, format="delta")
    assert sorted(fresh.read()[0]) == [[0], [1], [2], [3], [8]]
    write(delta, 9)
    write(delta, 10)
    commit(delta, 5).unlink()
    with pytest.raises(PoisonError, match="forgotten what came after version 4"):
        delta.read(resume)


def test_delta_not_there_yet(delta: Lake) -> None:
    """A table that does not exist yet is waited for."""
    with pytest.raises(TransientError, match="there is no delta table"):
        delta.read()


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (
            {
                "add": {
                    "path": "a.parquet",
                    "dataChange": True,
                    "deletionVector": {"storageType": "u"},
                }
            },
            "by vectors",
        ),
        ({"add": {"path": "s3://else/a.parquet", "dataChange": True}}, "outside its folder"),
        (
            {"add": {"path": "x/a.parquet", "partitionValues": {"shop": "a"}, "dataChange": True}},
            "do not tell",
        ),
        (
            {"metaData": {"configuration": {"delta.columnMapping.mode": "name"}}},
            "maps column names",
        ),
    ],
)
def test_delta_features_that_are_refused(delta: Lake, action: dict[str, Any], said: str) -> None:
    """What would be read wrongly is refused by name."""
    write(delta, 1)
    commit(delta, 1).write_text(json.dumps(action))
    with pytest.raises(ConfigurationError, match=said):
        delta.read()


# Iceberg


@pytest.fixture
def iceberg(tmp_path: Path) -> Iterator[tuple[Lake, Any]]:
    from pyiceberg.catalog.sql import SqlCatalog

    address = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    lake = Lake(tmp_path, format="iceberg", name="n.t", catalog=address, on_rewrite="fail")
    catalog = SqlCatalog("default", uri=address, warehouse=str(tmp_path))
    catalog.create_namespace("n")
    yield lake, catalog.create_table("n.t", rows(1).schema, location=str(lake.path))
    catalog.close()


def test_iceberg_by_snapshots(iceberg: tuple[Lake, Any]) -> None:
    """Each append comes once.

    A reader that comes after old snapshots expired takes their files from the oldest one left.
    """
    lake, table = iceberg
    assert lake.read()[0] == []
    table.append(rows(1, 2))
    table.append(rows(3))
    first, _, resume = lake.read()
    assert first == [[1, 2], [3]]
    table.append(rows(0))
    assert lake.read(resume)[0] == [[0]]
    table.maintenance.expire_snapshots().by_id(table.snapshots()[0].snapshot_id).commit()
    assert lake.read()[0] == [[1, 2], [3], [0]]


def test_iceberg_history_is_walked_only_to_the_last_snapshot_read(
    iceberg: tuple[Lake, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyiceberg searches all snapshots for each number, and a table may have ten thousands."""
    lake, table = iceberg
    for number in range(3):
        table.append(rows(number))
    resume = lake.read()[2]
    found, search = list[int](), TableMetadataV2.snapshot_by_id

    def search_once(metadata: TableMetadataV2, number: int) -> Any:
        """Note what is searched."""
        found.append(number)
        return search(metadata, number)

    monkeypatch.setattr(TableMetadataV2, "snapshot_by_id", search_once)
    assert lake.read(resume)[0] == []
    assert set(found) <= {table.current_snapshot().snapshot_id}


def test_iceberg_rewrite_is_refused(iceberg: tuple[Lake, Any]) -> None:
    """Deleted rows stop the source and say so; an overwrite that took nothing does not."""
    lake, table = iceberg
    table.append(rows(1, 2))
    lake.read()
    table.delete("n = 1")
    with pytest.raises(PoisonError, match="removed or changed rows"):
        lake.read()


def test_iceberg_may_begin_at_the_current_snapshot(
    tmp_path: Path, iceberg: tuple[Lake, Any]
) -> None:
    """Rows that were deleted before the source was made are no matter to it."""
    old, table = iceberg
    table.append(rows(1, 2))
    table.delete("n = 1")
    options = old.spec.sources["lake"].table
    assert options is not None
    lake = Lake(tmp_path, **options.model_dump() | {"start": "current"})
    found, _, resume = lake.read()
    assert found == [[2]]
    table.append(rows(3))
    assert lake.read(resume)[0] == [[3]]


def test_iceberg_catalog_that_is_away(tmp_path: Path) -> None:
    """A catalog that cannot be reached is waited for."""
    lake = Lake(
        tmp_path, format="iceberg", name="n.t", catalog=f"http://{LOOPBACK}:{choose_free_port()}/"
    )
    with pytest.raises(TransientError, match="catalog or files cannot be reached"):
        lake.read()


def test_iceberg_manifest_that_expires_meanwhile(iceberg: tuple[Lake, Any]) -> None:
    """A manifest that is gone when it is read is looked for again, by a table loaded again.

    The driver goes on.
    """
    lake, table = iceberg
    table.append(rows(1))
    hidden = [(path, path.with_suffix(".away")) for path in (lake.path / "metadata").glob("*.avro")]
    for path, away in hidden:
        path.rename(away)
    with pytest.raises(TransientError, match="a file of its metadata is gone"):
        lake.read()
    for path, away in hidden:
        away.rename(path)
    assert lake.read()[0] == [[1]]


def test_iceberg_rolled_back(iceberg: tuple[Lake, Any]) -> None:
    """A snapshot that is not an ancestor any more is a gap, not a reason to read everything again."""
    lake, table = iceberg
    table.append(rows(1))
    first = table.current_snapshot().snapshot_id
    table.append(rows(2))
    lake.read()
    table.manage_snapshots().set_current_snapshot(snapshot_id=first).commit()
    table.append(rows(3))
    with pytest.raises(PoisonError, match="has forgotten what came after"):
        lake.read()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"table": {"format": "iceberg"}}, "needs 'catalog' and 'name'"),
        ({"table": {"format": "delta", "name": "n.t", "catalog": "x"}}, "delta takes neither"),
        ({"table": {"format": "delta"}, "bounded": True}, "its commits say what is read"),
    ],
)
def test_specs_that_are_refused(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    """What does not fit together is said when the spec is read."""
    raw = (
        Lake(tmp_path, format="delta")
        .spec.sources["lake"]
        .model_dump(by_alias=True, exclude_unset=True)
    )
    with pytest.raises(ValueError, match=said):
        PipelineSpec.model_validate({"name": "p", "sources": {"lake": raw | more}})
