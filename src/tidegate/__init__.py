"""tidegate: event time, barriers and checkpoints for PySpark streams under Airflow."""

import sys

__version__ = "0.1.0"
# Two wheels have the parts of this package and of `tidegate.jobs`. Those that
# `supervision.submit.py_files` names are files on the path, and Python would look into one only.
__path__ += [f"{entry}/tidegate" for entry in sys.path if str(entry).endswith(".whl")]
