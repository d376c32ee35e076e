"""What odd values did in commit e3dab94, by its own names: each test says what should hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.spark.agreement import SECOND, Pair, Side, spec_of
from tests.spark.kafka_topics import rows

from tidegate.jobs.spark import cut_survey, mover

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark]
_TICK_MAX = (1 << 63) - 1


def _times(numbers: list[int], unit: str = "us") -> pa.Array:
    return pa.array(numbers, pa.int64()).cast(pa.timestamp(unit, "UTC"))


def _make_pair(session: SparkSession, folder: Path, **spec: Any) -> Pair:
    """Spark's mover against itself: the oracle of that commit has faults of its own."""
    pair = Pair(spec_of({"a": spec.pop("source", {})}, **spec), session, folder)
    again = mover.SparkMover(pair.store, pair.spec, folder / "again", session=session)
    pair.sides["reference"] = Side(again, "reference")
    return pair


@pytest.mark.parametrize("kind", ["text", "far"])
def test_core_c6(session: SparkSession, tmp_path: Path, kind: str) -> None:
    """A text that is not UTF-8, and a time beyond microseconds, cost their row."""
    schema = {"t": "timestamp", "k": "string", "x": "timestamp"}
    pair = _make_pair(session, tmp_path, source={"schema": schema})
    texts = pa.array([b"a", b"caf\xe9"] if kind == "text" else [b"a", b"b"]).view(pa.string())
    odd = _times([0, 10**17], "ms") if kind == "far" else _times([0, 0])
    pair.put("a", pa.table({"t": _times([0, SECOND]), "k": texts, "x": odd}))
    try:
        pair.run(SECOND)
    except Exception as error:
        pytest.fail(f"the pipeline ended: {type(error).__name__}: {error}")
    assert [row["_seq"] for row in pair.table("dead_letters")] == [1]


def test_core_c8(session: SparkSession, tmp_path: Path) -> None:
    """A sum that overflows ends no pipeline."""
    window = {"kind": "tumbling", "size": "10s", "keys": ["k"], "aggregates": {"total": "sum(n)"}}
    pair = _make_pair(session, tmp_path, windows={"w": window})
    try:
        for number in (_TICK_MAX, 1):
            pair.put("a", [{"t": SECOND, "kind": "data", "k": "x", "n": number, "v": None}])
            pair.run(SECOND)
        pair.run(100 * SECOND, done=True)
    except Exception as error:
        pytest.fail(f"the pipeline ended: {type(error).__name__}: {error}")


def test_core_c12(session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that the driver holds are bounded by bytes: 64,000,000 values were to be 1 GB."""
    monkeypatch.setattr(cut_survey, "NATIVE_CELLS", 64_000)  # so about 1 MB
    held: list[int] = []
    survey = mover.survey_cut

    def note_rows(*given: Any, **named: Any) -> Any:
        scans = survey(*given, **named)
        held.append(0 if scans.rows is None else scans.rows.nbytes)
        return scans

    monkeypatch.setattr(mover, "survey_cut", note_rows)
    pair = _make_pair(session, tmp_path)
    row = {"t": SECOND, "kind": "data", "n": 1, "v": 1.0}
    pair.put("a", [{**row, "k": letter * (4 << 20)} for letter in "xy"])
    pair.run(SECOND)
    assert max(held) < 2 << 20


def test_bugs_b19(session: SparkSession) -> None:
    """The reason of a message of a registry's serializer names its five bytes."""
    framed = b'\x00\x00\x00\x01\x02{"at": "2026-03-01T10:00:00Z", "n": 1}'
    (found,) = rows(session, [framed])
    assert "5 bytes" in found["_why"]
