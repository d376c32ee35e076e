"""A spec that is not in the repository becomes a pipeline of the proof."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.rows_on_spark import pipelines
from tests.rows_on_spark.__main__ import parse_masters
from tests.rows_on_spark.pipelines import list_indivisible, read_pipeline
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


def test_what_cannot_be_divided_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are counted by one task, compressed ones are read by one, and so are row groups."""
    monkeypatch.setattr(pipelines, "LARGEST_TASK", 1_000)
    store, out = LocalStore(tmp_path), io.BytesIO()
    numbers = pa.table({"n": range(1_000)})
    pq.write_table(numbers, out, row_group_size=900, compression="none", use_dictionary=False)
    large = {"1.csv": bytes(2_000), "2.csv.gz": bytes(3_000), "3.parquet": out.getvalue()}
    for key, data in {**large, "4.csv": b"small"}.items():
        store.put(key, data)
    found = list_indivisible(store)
    assert found["inspect"] == {"1.csv": 2_000, "2.csv.gz": 3_000}
    assert found["read"]["2.csv.gz"] == 3_000
    assert 900 * 8 < found["read"]["3.parquet"] < 100 * 8 + 900 * 8


def test_masters_are_named_with_commas() -> None:
    """The local one has two cores; others are refused."""
    assert parse_masters("local,connect") == ["local[2]", "connect"]
    with pytest.raises(argparse.ArgumentTypeError, match="yarn"):
        parse_masters("yarn")
