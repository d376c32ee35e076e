"""The judge of `make soak-real`: growth is found, and a sawtooth or noise is not taken for it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.bench.slopes import MEASURES, Sample, format_verdict, judge_slopes
from tests.e2e.soak_real import BucketUsage, measure_bucket


def _flat(draw: random.Random, epoch: int) -> float:
    """What maintenance takes away every 15 epochs, and noise."""
    return 1_000 + 20 * (epoch % 15) + draw.uniform(-30, 30)


def _series(growth: dict[str, float], seed: int) -> list[Sample]:
    """Samples of a run; `growth` is what a measure gains with each epoch."""
    draw, found = random.Random(seed), list[Sample]()
    for epoch in range(0, 450, 7):
        values = {m: _flat(draw, epoch) + growth.get(m, 0.0) * epoch for m in MEASURES}
        found.append(Sample(epoch, **values))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_sawtooth_is_flat(seed: int) -> None:
    """Four of four, whatever the noise."""
    verdict = format_verdict(judge_slopes(_series({}, seed)))
    assert verdict.endswith("4 of 4 slopes flat"), verdict


@pytest.mark.parametrize("measure", MEASURES)
def test_each_measure_that_grows_is_found(measure: str) -> None:
    """A quarter more over the run is growth, of this measure and of no other."""
    slopes = judge_slopes(_series({measure: 250 / 450}, 1))
    assert [slope.measure for slope in slopes if not slope.is_flat] == [measure]
    assert format_verdict(slopes).endswith("3 of 4 slopes flat")


def test_what_shrinks_is_flat() -> None:
    """Only growth fails a run."""
    slopes = judge_slopes(_series({"memory": -1.0}, 2))
    assert all(slope.is_flat for slope in slopes)


def test_too_few_samples_are_no_verdict() -> None:
    """A run that ended early must not pass."""
    with pytest.raises(ValueError, match="too few"):
        judge_slopes([Sample(n, 1, 1, 1, 1) for n in range(7)])


def test_rows_and_slots_are_not_counted_as_growth(tmp_path: Path) -> None:
    """What every epoch has to leave behind is left out; everything else is counted."""
    kept = ["iceberg/late/metadata/1.json", "state/000001-a/order.parquet", "logs/1/1.log"]
    rows = ["timelines/0/tables/late/1-a/rows.parquet", "iceberg/late/data/merged.parquet"]
    for key in [*kept, *rows, "timelines/0/slots/9.json"]:
        folder = tmp_path / key
        folder.mkdir(parents=True)
        (folder / "xl.meta").write_bytes(b"x" * 100)
    assert measure_bucket(tmp_path) == BucketUsage(objects=5, bytes=300)
