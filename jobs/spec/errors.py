"""The errors of reading and checking a pipeline spec."""

from __future__ import annotations

from typing import Final

from tidegate.errors import ConfigurationError, ErrorDefinition

_UNTOUCHED: Final = "nothing was started or changed"

SPEC_UNREADABLE: Final = ErrorDefinition(
    "spec.unreadable",
    ConfigurationError,
    "cannot read the spec {path}: {reason}",
    advice="give the path of a pipeline YAML file, for example dags/pipelines/flights.yaml",
)
SPEC_NOT_TEXT: Final = ErrorDefinition(
    "spec.unreadable", ConfigurationError, "{path} is not UTF-8 text"
)
SPEC_INVALID: Final = ErrorDefinition(
    "spec.invalid",
    ConfigurationError,
    "{findings}",
    kept=_UNTOUCHED,
    advice="correct {where}; `tidegate schema` prints every field with its choices",
)
SECRET_MISSING: Final = ErrorDefinition(
    "spec.no_secret",
    ConfigurationError,
    "{field}: the environment variable {variable} is not set",
    kept=_UNTOUCHED,
    advice="set {variable} where the driver runs",
)
