"""Where Airflow's processes find the store: a connection, or their environment."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.checkpoints.s3_store import S3Store
from tidegate.errors import ConfigurationError
from tidegate.operators.store_access import StoreAccess, build_child_environment


def _connection(monkeypatch: pytest.MonkeyPatch, **extra: Any) -> None:
    found = {
        "conn_type": "generic",
        "host": "http://minio:9000",
        "login": "who",
        "password": "do-not-tell",
        "extra": extra,
    }
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(found))


def test_a_connection_gives_address_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys reach a driver through its environment, and nothing that is printed."""
    _connection(monkeypatch, store="s3://lake/streams", region="eu-1")
    access = StoreAccess.resolve("lake")
    assert access.url == "s3://lake/streams"
    assert "do-not-tell" not in repr(access)
    given = build_child_environment(
        access, {"PATH": "/bin", "AIRFLOW_CONN_LAKE": "x", "AIRFLOW__CORE__FERNET_KEY": "x"}
    )
    assert given == {
        "PATH": "/bin",
        "PYTHONUNBUFFERED": "1",
        "TIDEGATE_STORE": "s3://lake/streams",
        "TIDEGATE_S3_ENDPOINT": "http://minio:9000",
        "TIDEGATE_S3_REGION": "eu-1",
        "TIDEGATE_S3_ACCESS_KEY": "who",
        "TIDEGATE_S3_SECRET_KEY": "do-not-tell",
    }


@pytest.mark.parametrize(
    ("extra", "token"), [({}, None), ({"session_token": "its-own"}, "its-own")]
)
def test_the_session_token_is_that_of_the_keys(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, str], token: str | None
) -> None:
    """The worker's own token belongs to other keys; without a login it stays."""
    inherited = {"TIDEGATE_S3_SESSION_TOKEN": "of-the-worker"}
    _connection(monkeypatch, store="s3://lake/streams", **extra)
    given = build_child_environment(StoreAccess.resolve("lake"), inherited)
    assert given.get("TIDEGATE_S3_SESSION_TOKEN") == token
    given = build_child_environment(StoreAccess("s3://lake/streams"), inherited)
    assert given["TIDEGATE_S3_SESSION_TOKEN"] == "of-the-worker"


def test_the_extra_names_another_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra wins over the host; the store is the connection's, not the environment's."""
    monkeypatch.setenv("TIDEGATE_STORE", "/elsewhere")
    _connection(monkeypatch, store="s3://lake/streams", endpoint="https://s3.example")
    access = StoreAccess.resolve("lake")
    assert access.environment["TIDEGATE_S3_ENDPOINT"] == "https://s3.example"
    assert isinstance(access.open(), S3Store)


def test_a_connection_without_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the connection and what to add."""
    _connection(monkeypatch)
    with pytest.raises(ConfigurationError, match="'lake' has no 'store' in its extra"):
        StoreAccess.resolve("lake")


def test_without_any_address_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said by the first task, before a driver is launched."""
    monkeypatch.delenv("TIDEGATE_STORE", raising=False)
    with pytest.raises(ConfigurationError, match="TIDEGATE_STORE is not set"):
        StoreAccess.resolve()


def test_triggers_share_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client per address and keys in a process; a task's own is its own."""
    _connection(monkeypatch, store="s3://lake/streams")
    one, two = StoreAccess.resolve("lake"), StoreAccess.resolve("lake")
    assert one.open_shared() is two.open_shared()
    assert one.open_shared() is not one.open()
    _connection(monkeypatch, store="s3://lake/others")
    assert StoreAccess.resolve("lake").open_shared() is not one.open_shared()
