"""Drivers on a real YARN, as `make yarn` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.yarn_runs import RUNS, SCENARIOS, Rig, rig_on_yarn

# No test of CI has a YARN: the jars and a driver per scenario take too long.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """A YARN and a MinIO; their paths are short, as in `make yarn`."""
    with TemporaryDirectory(prefix="ty", dir="/tmp") as folder, rig_on_yarn(Path(folder)) as found:
        yield found


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_a_pipeline_on_yarn_writes_the_tables_of_a_local_run(
    rig: Rig, name: str, mode: str
) -> None:
    """Whatever the scenario does to it, in client and in cluster mode."""
    assert SCENARIOS[name](rig, mode)
