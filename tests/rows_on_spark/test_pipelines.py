"""A spec that is not in the repository becomes a pipeline of the proof."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.rows_on_spark.__main__ import parse_masters
from tests.rows_on_spark.pipelines import read_pipeline
from tidegate.checkpoints.local_store import LocalStore

SPEC = """\
name: given
sources:
  s: {path: SOURCE, schema: {t: timestamp}, event_time: t, lag: 1s}
windows:
  w: {kind: tumbling, size: 1m, aggregates: {n: count(*)}}
"""


def write_spec(folder: Path, source: str) -> Path:
    """A spec with one source, and its input below `input`."""
    (folder / "input" / "inbox" / "s").mkdir(parents=True)
    (folder / "input" / "inbox" / "s" / "1.parquet").write_bytes(b"rows")
    file = folder / "given.yaml"
    file.write_text(SPEC.replace("SOURCE", source))
    return file


def test_a_given_source_has_its_files_and_an_end(tmp_path: Path) -> None:
    """The files are where the spec has them, with the marker that the folder lacks."""
    pipeline = read_pipeline(write_spec(tmp_path, "inbox/s/"), tmp_path / "input")
    store = LocalStore(tmp_path / "store")
    pipeline.fill(store, tmp_path)
    assert sorted(one.key for one in store.list_objects("")) == [
        "inbox/s/1.parquet",
        "inbox/s/_DONE",
    ]
    assert pipeline.fields["sources"]["s"]["bounded"]


@pytest.mark.parametrize("source", ["inbox/other", "s3://elsewhere/s"])
def test_a_source_outside_of_the_folder_is_refused(tmp_path: Path, source: str) -> None:
    """Its rows would not pass the proxy."""
    with pytest.raises(ValueError, match="source s: its path has to be a folder below"):
        read_pipeline(write_spec(tmp_path, source), tmp_path / "input")


def test_masters_are_named_with_commas() -> None:
    """The local one has two cores; others are refused."""
    assert parse_masters("local,connect") == ["local[2]", "connect"]
    with pytest.raises(argparse.ArgumentTypeError, match="yarn"):
        parse_masters("yarn")
