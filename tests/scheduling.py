"""Which tests share a worker of `pytest -n 2`, and which ones CI leaves out (`long`)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

ROOT = Path(__file__).parents[1]
# A second Airflow beside these would starve the first.
AIRFLOW_FILES = frozenset(
    {
        "tests/e2e/test_airflow_kills.py",
        "tests/e2e/test_browser.py",
        "tests/e2e/test_demo.py",
        "tests/e2e/test_git_deploys.py",
        "tests/e2e/test_jobs_airflow.py",
        "tests/infra/test_stack.py",
        "tests/operators/test_airflow_actions.py",
        "tests/operators/test_airflow_metrics.py",
        "tests/operators/test_airflow_splice.py",
    }
)
_ONE_WORKER = frozenset({"tests/operators/test_airflow.py", "tests/operators/test_api_server.py"})
# Those of CI that take longest, by the seconds of their tests in CI's record; the first of them
# stands for all that start Airflow. Started last, one of them would leave a worker idle.
SLOWEST_FILES: Final = (
    "tests/e2e/test_demo.py",
    "tests/e2e/test_airflow_submit.py",
    "tests/e2e/test_launchers.py",
    "tests/e2e/test_kills.py",
    "tests/e2e/test_landing.py",
    "tests/e2e/test_chaos.py",
    "tests/e2e/test_outages.py",
    "tests/sealed_queries/test_bucket_jobs.py",
    "tests/e2e/test_no_shared_disk.py",
    "tests/infra/test_production_steps.py",
    "tests/sealed_queries/test_launches.py",
    "tests/sealed_queries/test_jobs_matrix.py",
    "tests/e2e/test_edges.py",
    "tests/e2e/test_upgrade.py",
    "tests/spec/test_preset_examples.py",
    "tests/e2e/test_standby.py",
)
_SPARK_FOLDER = "tests/spark/"
LONG: Final = (pytest.mark.e2e, pytest.mark.slow, pytest.mark.long)
"""Marks of a test that `make e2e` runs and CI does not (CONTRIBUTING.md, "What CI runs")."""


def name_scope(test: str, *, by_files: bool) -> str:
    """Name the group of a test: a group runs on one worker, in order.

    Args:
        test: node id.
        by_files: the files are dealt out (``--dist loadfile``), not the tests (``loadgroup``).
    """
    file = test.partition("::")[0]
    if by_files:
        return "airflow" if file in AIRFLOW_FILES else file
    if file.startswith(_SPARK_FOLDER):
        return _SPARK_FOLDER  # one session, and one JVM that is warm
    return file if file in _ONE_WORKER or has_module_fixture(file) else test


def rank_file(test: str) -> int:
    """Place of a test's file among the slowest ones; all others come behind them.

    Args:
        test: node id.
    """
    file = test.partition("::")[0]
    return SLOWEST_FILES.index(file) if file in SLOWEST_FILES else len(SLOWEST_FILES)


def sample_in_ci(values: Iterable[Any], count: int) -> list[Any]:
    """Parameters of a test whose cases are drawn: CI runs the first ones, `make e2e` the others.

    Args:
        values: all of them.
        count: how many CI runs.
    """
    return [
        value if number < count else pytest.param(value, marks=LONG)
        for number, value in enumerate(values)
    ]


@cache
def has_module_fixture(file: str) -> bool:
    """Whether a fixture is made once per module: dealt out, each worker would make it."""
    return 'scope="module"' in (ROOT / file).read_text("utf-8")
