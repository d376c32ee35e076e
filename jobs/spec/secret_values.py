"""Masks the secrets that a spec should not hold but may."""

from __future__ import annotations

import re
from typing import Any, Final

from tidegate.jobs.spec.pipeline import PipelineSpec

_MASK: Final = "***"
_PASSWORD_IN_ADDRESS: Final = re.compile(r"(://[^/@\s:]*:)(?!\$\{\w+\}@)[^/@\s]+@")
# The end of an option's name: `sasl.oauthbearer.token.endpoint.url` is not a secret.
_SECRET_NAME: Final = re.compile(
    r"(password|passwd|secret|token|credential|login|access.?key|secret.?key|jaas.config)$",
    re.IGNORECASE,
)
# Sections whose keys are names that users choose; their values are types and names.
_NAMED_BY_USERS: Final = frozenset({"schema", "columns", "renamed", "headers", "keys", "severity"})


def mask_secrets(spec: PipelineSpec) -> PipelineSpec:
    """Return the spec with ``***`` for passwords in addresses and for secret options.

    Secret are texts whose name ends with a word such as password, secret, token, credential or
    login. Columns and other names that users choose are not judged. Without a secret, the spec
    itself is returned.

    What is written as ``env:NAME`` or ``${NAME}`` stays, because it is not a secret. Users who may
    read the bucket may read the specs in it, so these must not hold the keys of other systems.
    """
    data = spec.model_dump(mode="json", by_alias=True)
    masked = _mask_value("", data)
    return spec if masked == data else PipelineSpec.model_validate(masked)


def mask_address(address: str) -> str:
    """Return an address with ``***`` for the password that it may hold; ``${NAME}`` stays."""
    return _PASSWORD_IN_ADDRESS.sub(rf"\1{_MASK}@", address)


def _mask_value(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        chosen = name in _NAMED_BY_USERS
        return {key: _mask_value("" if chosen else str(key), part) for key, part in value.items()}
    if isinstance(value, list):
        return [_mask_value(name, part) for part in value]
    if not isinstance(value, str):
        return value
    if _SECRET_NAME.search(name) and not value.startswith(("env:", "${")):
        return _MASK
    return mask_address(value)
