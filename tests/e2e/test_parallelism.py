"""State that was written with one parallelism is read with another, and small epochs write small
numbers of objects.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.drivers import Steady
from tests.e2e.feed import SPEC
from tidegate.checkpoints.manifest import Manifest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def with_parallelism(cores: int, partitions: int) -> str:
    """The steady pipeline on so many cores, with so many shuffle partitions."""
    conf = f'conf: {{spark.sql.shuffle.partitions: "{partitions}"}}'
    return SPEC.replace("spark: {", f"spark: {{master: 'local[{cores}]', {conf}, ")


def objects(epoch: Manifest) -> dict[str, int]:
    """Objects that the epoch itself wrote, by table and kind of state."""
    own = [f for f in epoch.all_files() if f"/{epoch.slot:06d}-{epoch.attempt}" in f.key]
    return dict(Counter(f.kind for f in own))


# In CI, `test_edges.py` goes on with another parallelism half-way.
@pytest.mark.long
def test_state_moves_to_another_parallelism(tmp_path: Path) -> None:
    """Six epochs with local[1] and 2 partitions, the rest with local[2] and 5.

    Every row in one place, windows exact.

    In both an epoch writes one object per table and kind of state.
    """
    steady = Steady(tmp_path, 12, spec=with_parallelism(1, 2))
    assert steady.run("", "--epochs", "6") == 0, steady.log_text()
    before = steady.log().head().slot
    assert any(f.kind == "order" for f in steady.log().head().record.segments)  # type: ignore[union-attr]
    steady.change_spec(with_parallelism(2, 5))
    assert steady.run() == 0, steady.log_text()
    found = steady.exact()
    assert found.problems == []
    assert sum(source["read"] for source in found.rows.values()) == steady.rows
    epochs = [filled.epoch for filled in steady.log().epochs_between(0, 1, 1000)]
    assert before == 6 < len(epochs)
    most = [max(objects(e).values(), default=0) for e in epochs]
    assert max(most) == 1, [objects(e) for e in epochs]
