"""From an address to a store."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.memory_store import MemoryBucket, MemoryStore
from tidegate.checkpoints.s3_store import S3Settings, S3Store
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError

_MEMORY_BUCKETS: dict[
    str, MemoryBucket
] = {}  # memory://name means the same bucket everywhere in one process


def open_store(url: str) -> Store:
    """Open `s3://bucket/prefix`, `file:///path`, a plain path, or `memory://name`.

    Makes no request yet.

    Raises:
        ConfigurationError: the address is none of these, or its folder cannot be used.
    """
    if "://" not in url:
        return LocalStore(url)
    parts = urlsplit(url)
    if parts.scheme == "s3" and parts.netloc:
        return S3Store(S3Settings.from_environment(parts.netloc, parts.path.strip("/")))
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return LocalStore(unquote(parts.path))
    if parts.scheme == "memory" and parts.netloc:
        return MemoryStore(
            _MEMORY_BUCKETS.setdefault(parts.netloc, MemoryBucket()), name=parts.netloc
        )
    raise ConfigurationError(
        f"{url!r} is not the address of a store",
        code="store.bad_url",
        advice="use s3://bucket/prefix, file:///path, or a plain path",
    )
