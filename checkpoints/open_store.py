"""From an address to a store."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.s3_store import S3Settings, S3Store
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError


def open_store(url: str) -> Store:
    """Open `s3://bucket/prefix`, `file:///path` or a plain path.

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
    raise ConfigurationError(
        f"{url!r} is not the address of a store",
        code="store.bad_url",
        advice="use s3://bucket/prefix, file:///path, or a plain path",
    )
