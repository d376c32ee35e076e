"""Applications, killed and restored, with a real Spark."""

from __future__ import annotations

import random
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest

from tests.sealed_queries.apps import APPS
from tests.sealed_queries.jobs_proof import prove_combination
from tests.sealed_queries.rig import COMBINATIONS

_IN_CI = ("clicks", "rocksdb-2")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("app", "name"),
    [
        pytest.param(*pair, marks=() if pair == _IN_CI else pytest.mark.long)
        for pair in product(APPS, COMBINATIONS)
    ],
)
def test_kills_and_restores_do_not_show_in_the_sinks(app: str, name: str, tmp_path: Path) -> None:
    """Each batch holds the rows of the undisturbed run, for each kind of state."""
    dice = random.Random(name)
    with ExitStack() as resources:
        APPS[app].prepare(tmp_path / "server", resources)
        counts = prove_combination(tmp_path, name, 1, 1, dice, app=APPS[app], files=4)
    assert counts == (1, 1, 0)
