"""The example job, killed and restored, with a real Spark."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.sealed_queries.jobs_proof import prove_combination
from tests.sealed_queries.rig import COMBINATIONS


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "rocksdb-2" else pytest.mark.long)
        for name in COMBINATIONS
    ],
)
def test_kills_and_restores_do_not_show_in_the_sinks(name: str, tmp_path: Path) -> None:
    """Each batch holds the rows of the undisturbed run, for each kind of state."""
    assert prove_combination(tmp_path, name, 1, 1, random.Random(name), files=4) == (1, 1, 0)
