"""Airflow's side of tidegate: launch, adopt, watch, recover, check."""

from typing import Any

if __name__ != "tidegate.operators":
    raise ImportError(f"import tidegate.operators, not {__name__}")

__all__ = ["get_provider_info"]


def get_provider_info() -> dict[str, Any]:
    """Return what Airflow lists about this provider.

    This module imports nothing heavy, because Airflow calls the function at every start.
    """
    package = "tidegate.operators"
    operators = (
        "stream_operator",
        "recover_and_pin",
        "deploy_operator",
        "child_operators",
        "splice_operators",
        "assets",
        "sweep_operator",
    )
    triggers = ("trigger", "assets")
    return {
        "package-name": "tidegate",
        "name": "tidegate",
        "description": (
            "Streams on PySpark with kept late rows, sealed checkpoints and restores, supervised by"
            " Airflow."
        ),
        "integrations": [{"integration-name": "tidegate", "tags": ["service"]}],
        **{
            kind: [
                {
                    "integration-name": "tidegate",
                    "python-modules": [f"{package}.{name}" for name in names],
                }
            ]
            for kind, names in (("operators", operators), ("triggers", triggers))
        },
        "extra-links": [f"{package}.child_operators.DataDocsLink"],
        "asset-uris": [{"schemes": ["tidegate"], "handler": None}],
    }
