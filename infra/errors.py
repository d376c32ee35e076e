"""Every error of the local stack, the demo and its feed; see `tidegate.errors.ErrorDefinition`.

Not here is `airflow_processes.AirflowApiError`, whose code carries the HTTP status.
"""

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
