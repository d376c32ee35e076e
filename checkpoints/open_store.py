"""Opens the store at an address."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from tidegate.checkpoints.errors import BAD_STORE_URL
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.s3_store import S3Settings, S3Store
from tidegate.checkpoints.store import Store


def open_store(url: str) -> Store:
    """Open `s3://bucket/prefix`, `file:///path` or a plain path, without a request to the server.

    A missing folder is made. Settings of S3 come from the environment.

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
    raise BAD_STORE_URL(url=url)
