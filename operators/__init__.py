"""Airflow's side of tidegate: launch, adopt, watch, recover, check."""

from typing import Any

if __name__ != "tidegate.operators":
    raise ImportError(f"import tidegate.operators, not {__name__}")

__all__ = ["get_provider_info"]


def get_provider_info() -> dict[str, Any]:
    """What Airflow lists about this provider. Imports nothing: Airflow calls it at every start."""
    package = "tidegate.operators"
    return {
        "package-name": "tidegate",
        "name": "tidegate",
        "description": (
            "Streams on PySpark with kept late rows, sealed checkpoints and restores, supervised by"
            " Airflow."
        ),
        "integrations": [{"integration-name": "tidegate", "tags": ["service"]}],
        "operators": [
            {
                "integration-name": "tidegate",
                "python-modules": [
                    f"{package}.{name}"
                    for name in (
                        "stream",
                        "recover",
                        "approve",
                        "pin",
                        "quality",
                        "maintain",
                        "backfill",
                        "windows",
                        "sweep",
                    )
                ],
            }
        ],
        "triggers": [
            {
                "integration-name": "tidegate",
                "python-modules": [f"{package}.trigger", f"{package}.assets"],
            }
        ],
        "extra-links": [f"{package}.quality.DataDocsLink"],
        "asset-uris": [{"schemes": ["tidegate"], "handler": None}],
    }
