"""How Airflow's processes reach the bucket: by an Airflow connection, or by their environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.store import Store

from .errors import BAD_CONNECTION, NO_STORE

_SESSION_TOKEN = "TIDEGATE_S3_SESSION_TOKEN"


@dataclass(frozen=True)
class StoreAccess:
    """Address of the store, and what a process needs in its environment to open it.

    Attributes:
        url: `s3://bucket/prefix` or a folder.
        environment: endpoint and keys; empty when the processes already have them. Never logged,
            and never an argument of a process.
    """

    url: str
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def resolve(cls, conn_id: str | None = None) -> StoreAccess:
        """Read the address from the named Airflow connection, or from `TIDEGATE_STORE`.

        A connection has the endpoint as host or extra `endpoint`, the keys as login and password,
        the address as extra `store`, and optionally the extras `region` and `session_token`.

        Raises:
            ConfigurationError: no address is configured.
            AirflowNotFoundException: there is no such connection.
        """
        if conn_id is not None:
            # Imported here, because `drain_on_exit` does not need Airflow.
            from airflow.sdk import Connection

            return cls.from_connection(Connection.get(conn_id))
        url = os.environ.get("TIDEGATE_STORE")
        if not url:
            raise NO_STORE()
        return cls(url)

    @classmethod
    def from_connection(cls, connection: Any) -> StoreAccess:
        """Read the address from a connection; tasks and API server load theirs in different ways.

        Raises:
            ConfigurationError: the connection names no store.
        """
        extra = connection.extra_dejson
        if "store" not in extra:
            raise BAD_CONNECTION(conn_id=connection.conn_id)
        environment = {
            "TIDEGATE_S3_ENDPOINT": extra.get("endpoint") or connection.host,
            "TIDEGATE_S3_REGION": extra.get("region"),
            "TIDEGATE_S3_ACCESS_KEY": connection.login,
            "TIDEGATE_S3_SECRET_KEY": connection.password,
            _SESSION_TOKEN: extra.get("session_token"),
        }
        return cls(
            str(extra["store"]), {key: str(value) for key, value in environment.items() if value}
        )

    def open(self) -> Store:
        """Open the store. No request is made yet; a local folder is made if it is missing."""
        return open_store(self.url, self.environment or os.environ)

    def open_shared(self) -> Store:
        """Open the store once per process, because each S3 client costs 10 MB.

        It gives up soon, because its users look again after a moment. See
        docs/decisions/0060-triggers-share-one-store-client.md.
        """
        return _open_cached_store(self.url, tuple(sorted(self.environment.items())))


@cache
def _open_cached_store(url: str, environment: tuple[tuple[str, str], ...]) -> Store:
    # Imported here, because `drain_on_exit` needs no client.
    from .store_guard import shorten_patience

    return shorten_patience(StoreAccess(url, dict(environment)).open())


def build_child_environment(
    access: StoreAccess, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of a driver or check.

    That is the caller's without Airflow's settings and secrets and without PYTHONPATH, plus the
    store's address and keys.
    """
    kept = {
        key: value
        for key, value in inherited.items()
        # Airflow's variables hold its secrets, and its PYTHONPATH may hide the driver's packages.
        if "AIRFLOW" not in key and key != "PYTHONPATH"
    }
    if "TIDEGATE_S3_ACCESS_KEY" in access.environment:
        kept.pop(_SESSION_TOKEN, None)  # it belongs to other keys
    return {**kept, "TIDEGATE_STORE": access.url, "PYTHONUNBUFFERED": "1", **access.environment}


def get_tidegate_home() -> Path:
    """Return `TIDEGATE_HOME`, the folder for drivers' logs and all else that outlives a task.

    Default: `~/.tidegate`.
    """
    return Path(os.environ.get("TIDEGATE_HOME") or Path.home() / ".tidegate").absolute()
