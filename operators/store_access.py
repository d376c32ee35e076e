"""How Airflow's processes reach the bucket.

By an Airflow connection, or by the environment they were started with.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.s3_store import S3Settings, S3Store
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError


@dataclass(frozen=True)
class StoreAccess:
    """Address of the store, and what a process needs in its environment to open it.

    Attributes:
        url: `s3://bucket/prefix` or a folder.
        environment: endpoint and keys; empty when the processes already have them. Never logged,
            never an argument.
    """

    url: str
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def resolve(cls, conn_id: str | None = None) -> StoreAccess:
        """From the Airflow connection, if one is named, else from `TIDEGATE_STORE` and its companions.

        The connection: host or extra `endpoint`, login and password as keys, extra `store` with the
        address, optional extra `region`.

        Raises:
            ConfigurationError: no address is configured.
        """
        if conn_id is not None:
            from airflow.sdk import Connection

            return cls.from_connection(Connection.get(conn_id))
        url = os.environ.get("TIDEGATE_STORE")
        if not url:
            raise ConfigurationError(
                "no store: TIDEGATE_STORE is not set for Airflow's processes",
                code="airflow.no_store",
                advice=(
                    "set TIDEGATE_STORE=s3://bucket (and TIDEGATE_S3_*), or name a connection:"
                    " build_dags(..., conn_id=...)"
                ),
            )
        return cls(url)

    @classmethod
    def from_connection(cls, found: Any) -> StoreAccess:
        """From a connection, however it was found.

        Tasks and the API server find theirs in different ways.

        Raises:
            ConfigurationError: it names no store.
        """
        extra = found.extra_dejson
        if "store" not in extra:
            raise ConfigurationError(
                f"the connection {found.conn_id!r} has no 'store' in its extra",
                code="airflow.bad_connection",
                advice='set extra to {"store": "s3://bucket", "endpoint": "https://..."}',
            )
        wanted = {
            "TIDEGATE_S3_ENDPOINT": extra.get("endpoint") or found.host,
            "TIDEGATE_S3_REGION": extra.get("region"),
            "TIDEGATE_S3_ACCESS_KEY": found.login,
            "TIDEGATE_S3_SECRET_KEY": found.password,
        }
        return cls(str(extra["store"]), {key: str(value) for key, value in wanted.items() if value})

    def open(self) -> Store:
        """Open the store. No request is made yet."""
        if not self.environment or not self.url.startswith("s3://"):
            return open_store(self.url)
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        settings: dict[str, Any] = {"bucket": bucket, "prefix": prefix.strip("/")}
        names = {
            "endpoint": "ENDPOINT",
            "region": "REGION",
            "access_key": "ACCESS_KEY",
            "secret_key": "SECRET_KEY",
        }
        found = {key: self.environment.get(f"TIDEGATE_S3_{name}") for key, name in names.items()}
        return S3Store(
            S3Settings.model_validate(
                settings | {key: value for key, value in found.items() if value}
            )
        )

    def open_shared(self) -> Store:
        """The same store for everybody in this process who asks for it.

        Each S3 client of its own costs 10 MB.
        """
        return _open_cached_store(self.url, tuple(sorted(self.environment.items())))


@cache
def _open_cached_store(url: str, environment: tuple[tuple[str, str], ...]) -> Store:
    return StoreAccess(url, dict(environment)).open()


def build_child_environment(
    access: StoreAccess, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of a driver or check.

    The caller's without Airflow's own settings and secrets, plus the store's keys.
    """
    kept = {
        key: value
        for key, value in inherited.items()
        if "AIRFLOW" not in key and key != "PYTHONPATH"
    }
    return {**kept, "TIDEGATE_STORE": access.url, "PYTHONUNBUFFERED": "1", **access.environment}


def get_tidegate_home() -> Path:
    """`TIDEGATE_HOME`: logs of drivers and whatever else must outlive a task."""
    return Path(os.environ.get("TIDEGATE_HOME") or Path.home() / ".tidegate").absolute()
