"""Shows broken specs of `pipelines/`, or `TIDEGATE_PIPELINES`, among Airflow's import errors.

This file has no DAGs, because Airflow would start none of a file with an import error.
"""

import os
from pathlib import Path

from tidegate.operators.factory import check_specs

# Airflow looks for the words "airflow" and "DAG" before it parses a file.
check_specs(os.environ.get("TIDEGATE_PIPELINES") or Path(__file__).parent / "pipelines")
