"""Shared by every tier: give unmarked tests their tier, keep Airflow's home out of the user's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

TIERS = ("unit", "minio", "spark", "airflow", "e2e")

# Importing Airflow creates its home folder; doctest collection imports modules of tidegate.operators.
os.environ.setdefault("AIRFLOW_HOME", str(Path(tempfile.gettempdir()) / f"tidegate-tests-airflow-{os.getuid()}"))
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            item.add_marker(pytest.mark.unit)
