"""Canonical JSON bytes of records, and the SHA-256 hashes of the chain.

A hash is always taken over the bytes in the bucket, never over a model that was serialised again.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20  # 1 MiB: large enough to hide call overhead, small enough for any executor


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
    """Return the hex SHA-256 of a file, which is read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _refuse_foreign_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"JSON keys are strings; got {key!r}")
            _refuse_foreign_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _refuse_foreign_keys(inner)
