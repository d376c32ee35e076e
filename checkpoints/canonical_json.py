"""Canonical JSON bytes of records, and the SHA-256 hashes of the chain.

A hash is always taken over the bytes in the bucket, never over a model that was serialised again.
"""

import hashlib
import json
from pathlib import Path
from typing import Any


def canonical_bytes(value: Any) -> bytes:
    """Return `value` as UTF-8 JSON with sorted keys and no spaces.

    Raises:
        ValueError: a key is not a string (JSON would change it silently), or a number is NaN or
            infinite.
        TypeError: a value has a type that JSON does not have.
    """
    _refuse_foreign_keys(value)
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def parse_json(data: bytes) -> Any:
    """Read JSON bytes; raises ValueError if they are not UTF-8 JSON."""
    return json.loads(data.decode())


def sha256_of_bytes(data: bytes) -> str:
    """Return the hex SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse_foreign_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"JSON keys are strings; got {key!r}")
            _refuse_foreign_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _refuse_foreign_keys(inner)
