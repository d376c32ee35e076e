"""Faults of a cluster, as `make cluster-faults` runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster_faults import RUNS, Bench, open_bench, run_fault

_REAL = (pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A store for all faults."""
    with open_bench(tmp_path_factory.mktemp("faults")) as found:
        yield found


@pytest.mark.parametrize(("name", "master"), [pytest.param(*run, marks=_REAL) for run in RUNS])
def test_a_fault_of_a_cluster_does_not_show(bench: Bench, name: str, master: str) -> None:
    """Every row is in one place, and no process reads a file that no manifest names."""
    assert run_fault(bench, name, master)
