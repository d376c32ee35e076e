"""Airflow's side of tidegate: launch, adopt, watch, recover, check."""

from tidegate.json_types import JsonObject, read_data_file

if __name__ != "tidegate.operators":
    raise ImportError(f"import tidegate.operators, not {__name__}")

__all__ = ["get_provider_info"]


def get_provider_info() -> JsonObject:
    """Return what Airflow lists about this provider.

    This module imports nothing heavy, because Airflow calls the function at every start.
    """
    provider = read_data_file(__name__, "provider.toml")["provider"]
    # TOML has no null.
    return {**provider, "asset-uris": [{"schemes": ["tidegate"], "handler": None}]}
