"""tidegate: event time, barriers and checkpoints for PySpark streams under Airflow."""

__version__ = "0.1.0"
