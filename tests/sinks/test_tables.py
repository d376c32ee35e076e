"""What readers get: one cut, current revisions, exports, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from tests.sinks.conftest import World, make_spec

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.sinks.published_tables import (
    export_table,
    find_published_slot,
    read_table,
    select_current_revisions,
    to_json_lines,
)
from tidegate.jobs.sinks.table_maintenance import list_referenced_files
from tidegate.jobs.spec.window_specs import WindowSpec

HOUR = 3_600_000_000


@pytest.fixture
def published(world: World) -> World:
    world.seal(3, ("events", "late"))
    world.sink().follow(world.log)
    return world


def test_reads_without_a_catalog(published: World) -> None:
    """A reader needs the bucket only: the catalog may be on another host, or gone."""
    published.lose_catalog()
    table = read_table(published.spec, published.store, "events")
    assert table.schema == build_table_schema(published.spec, "events")
    assert table["_epoch"].to_pylist() == [1, 1, 2, 2, 3, 3]


def test_older_cut(published: World) -> None:
    """`at` gives every table as it stood after that slot."""
    found = {
        name: read_table(published.spec, published.store, name, at=2)
        for name in ("events", "late", "checkpoints")
    }
    assert {name: max(t["_epoch"].to_pylist()) for name, t in found.items()} == {
        "events": 2,
        "late": 2,
        "checkpoints": 2,
    }


def test_cut_that_is_not_published_yet(published: World) -> None:
    """A slot that the tables do not show yet is refused with what they show."""
    published.seal(1)
    with pytest.raises(ConfigurationError, match="up to 3"):
        read_table(published.spec, published.store, "events", at=4)


def test_tables_without_rows_are_empty(published: World) -> None:
    """A table that never had a row has its columns and no rows."""
    for name in ("barriers", "dead_letters", "hourly"):
        assert read_table(published.spec, published.store, name).schema == build_table_schema(
            published.spec, name
        )
        assert read_table(published.spec, published.store, name, current_only=True).num_rows == 0


def test_nothing_published(world: World) -> None:
    """Before the first epoch every table is empty."""
    assert all(
        read_table(world.spec, world.store, name).num_rows == 0 for name in world.spec.table_names
    )


def test_unknown_table_lists_choices(world: World) -> None:
    """An unknown name is the user's mistake and lists the tables."""
    with pytest.raises(ConfigurationError) as caught:
        read_table(world.spec, world.store, "nope")
    assert "events, late, hourly" in str(caught.value)


def test_columns(published: World) -> None:
    """Only the wanted columns are read."""
    table = read_table(published.spec, published.store, "events", columns=("_epoch", "carrier"))
    assert table.column_names == ["_epoch", "carrier"]


def test_missing_metadata_is_transient(published: World) -> None:
    """Metadata that cannot be read is an error to try again, not a traceback."""
    for entry in list(published.store.list_objects("p/iceberg/events/")):
        published.store.delete(entry.key)
    with pytest.raises(TransientError, match="cannot be read"):
        read_table(published.spec, published.store, "events")


def test_checkpoints_table_says_what_the_manifest_says(published: World) -> None:
    """One row per sealed epoch, with the epoch's own counts."""
    table = read_table(published.spec, published.store, "checkpoints")
    assert table.schema == build_table_schema(published.spec, "checkpoints")
    assert table["rows_read"].to_pylist() == [2, 2, 2]
    assert table["slot"].to_pylist() == [1, 2, 3]
    assert table["checkpoint_id"][0].as_py().startswith("t0-000001-")


def results(*rows: tuple[str | None, int, int, int, int, list[str] | None]) -> Any:
    """Window results: (carrier, start hour, end hour, revision, epoch, replaces)."""
    spec = make_spec(windows={"w": {**SESSIONS, "keys": ["carrier"]}})
    schema = build_table_schema(spec, "w")
    columns: dict[str, list[Any]] = {f.name: [] for f in schema}
    for carrier, start, end, revision, epoch, replaces in rows:
        values = {
            "carrier": carrier,
            "revision": revision,
            "_epoch": epoch,
            "replaces": replaces,
            "n": epoch,
            "_timeline": 0,
        }
        values |= {"window_start": start * HOUR, "window_end": end * HOUR}
        for name, cells in columns.items():
            cells.append(values[name])
    arrays = [
        (
            pa.array(columns[f.name], pa.int64()).cast(f.type)
            if pa.types.is_timestamp(f.type)
            else pa.array(columns[f.name], f.type)
        )
        for f in schema
    ]
    return pa.table(arrays, schema=schema)


SESSIONS = {"kind": "session", "gap": "1h", "aggregates": {"n": "count(*)"}}


def window(**more: Any) -> WindowSpec:
    """The window of `results`."""
    return WindowSpec.model_validate({**SESSIONS, "keys": ["carrier"], **more})


def test_newest_revision_per_result() -> None:
    """Of each key and window only the greatest revision stays; null is a key like any other."""
    table = results(
        ("a", 0, 1, 0, 1, None),
        ("a", 0, 1, 1, 3, None),
        (None, 0, 1, 0, 2, None),
        ("a", 1, 2, 0, 2, None),
    )
    assert select_current_revisions(table, window())["n"].to_pylist() == [3, 2, 2]


def test_replaced_sessions_are_gone() -> None:
    """A session that merged into a later one is not current, for its own key only."""
    names = [
        "1970-01-01T00:00:00Z/1970-01-01T01:00:00Z",
        "1970-01-01T03:00:00Z/1970-01-01T04:00:00Z",
    ]
    table = results(
        ("a", 0, 1, 0, 1, []),
        ("b", 0, 1, 0, 1, []),
        ("a", 3, 4, 0, 2, []),
        ("a", 0, 4, 1, 3, names),
        ("a", 6, 7, 0, 4, []),
    )
    current = select_current_revisions(table, window())
    assert list(zip(current["carrier"].to_pylist(), current["n"].to_pylist(), strict=True)) == [
        ("b", 1),
        ("a", 3),
        ("a", 4),
    ]


def test_window_without_keys() -> None:
    """A window without keys has one result per bounds."""
    table = results(("a", 0, 1, 0, 1, None), ("b", 0, 1, 1, 3, None)).drop_columns(["carrier"])
    assert select_current_revisions(table, window(keys=[]))["n"].to_pylist() == [3]


def test_delta_revisions_are_all_current() -> None:
    """Under `revisions: delta` each revision carries a part, so none replaces another."""
    table = results(("a", 0, 1, 0, 1, None), ("a", 0, 1, 1, 3, None))
    assert select_current_revisions(table, window(revisions="delta")) is table


@pytest.mark.parametrize("suffix", ["parquet", "csv", "json"])
def test_export(tmp_path: Path, suffix: str) -> None:
    """A table is written in each format and can be read back."""
    table = results(("a", 0, 1, 0, 1, ["x"]), (None, 1, 2, 0, 2, None))
    path = tmp_path / f"out.{suffix}"
    export_table(table, path)
    if suffix == "parquet":
        assert pq.read_table(path).equals(table)
    elif suffix == "csv":
        assert pyarrow.csv.read_csv(path)["replaces"].to_pylist() == ['["x"]', ""]
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert rows[0]["window_end"] == "1970-01-01T01:00:00+00:00"
        assert rows[1]["replaces"] is None


@pytest.mark.parametrize("name", ["out.xlsx", "missing/folder/out.csv"])
def test_export_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    """Another ending or an unwritable place is the user's mistake, with the file named."""
    with pytest.raises(ConfigurationError, match=r"out\."):
        export_table(results(), tmp_path / name)


def test_referenced_files_are_those_of_every_kept_snapshot(published: World) -> None:
    """GC learns every data file that a reader of the published tables may open."""
    referenced = list_referenced_files(published.spec, published.store)
    found = {file for file in referenced if "/metadata/" not in file}
    epochs = [f.epoch for f in published.log.epochs_between(0, 1, 3)]
    named = {
        published.store.uri(f.key) for e in epochs for files in e.files.values() for f in files
    }
    assert named < found
    assert len(found - named) == 3  # the files of the checkpoints table, which no manifest names


def test_published_upto_is_a_position_of_the_current_lineage(published: World) -> None:
    """After a restore only the slots before the fork count, until the tables have followed."""
    target = published.log.open_checkpoint(published.log.head().checkpoint).epoch.parent  # type: ignore[arg-type]
    published.seal(1)
    assert find_published_slot(published.spec, published.log) == 3
    published.fork(CheckpointId.parse(str(target)))
    assert find_published_slot(published.spec, published.log) == 2
    published.seal(2)  # slots of the new timeline, which the tables do not have
    assert find_published_slot(published.spec, published.log) == 2


def test_published_upto_is_what_no_sleeping_publisher_takes_back(published: World) -> None:
    """One may have read the restore to the beginning, and rewind the tables after the next one."""
    newest = published.log.head().checkpoint
    published.fork(None)
    published.fork(newest)
    assert find_published_slot(published.spec, published.log) == 0


def test_nothing_published_protects_everything(world: World) -> None:
    """Before the first publish no slot may be retired, and no file is referenced."""
    assert (
        find_published_slot(world.spec, world.log),
        list_referenced_files(world.spec, world.store),
    ) == (0, set())


def test_what_is_no_number_is_json_all_the_same() -> None:
    """JSON has no word for it.

    A text is there instead, also inside of lists, and numbers stay numbers.
    """
    values = pa.table(
        {"x": [float("nan"), float("inf"), 1.5], "xs": [[1.0], [float("-inf")], None]}
    )

    def refuse(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    assert [
        json.loads(line, parse_constant=refuse) for line in to_json_lines(values).splitlines()
    ] == [
        {"x": "NaN", "xs": [1.0]},
        {"x": "Infinity", "xs": ["-Infinity"]},
        {"x": 1.5, "xs": None},
    ]
