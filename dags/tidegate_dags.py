"""Builds the Airflow DAGs of every spec in `pipelines/` here, or in `TIDEGATE_PIPELINES`."""

import os
from pathlib import Path

from tidegate.operators.factory import build_dags

# Airflow looks for the words "airflow" and "DAG" before it parses a file.
globals().update(
    build_dags(os.environ.get("TIDEGATE_PIPELINES") or Path(__file__).parent / "pipelines")
)
