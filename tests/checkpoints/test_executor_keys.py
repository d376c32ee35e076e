"""Keys that executors have of their own and that expire."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.servers.expiring_keys import ExpiringKeys
from tests.servers.minio import RealMinio

from tidegate.checkpoints.executor_keys import choose_task_keys
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.store import StoreDeniedError


@pytest.mark.minio
def test_the_keys_of_a_profile_are_renewed(
    real_minio: RealMinio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is open goes on with new keys; neither those of the driver nor of the host count."""
    keys = ExpiringKeys(tmp_path / "keys", real_minio)
    for name in ("TIDEGATE_S3_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.setenv(name, "unknown")
    for name in ("TIDEGATE_S3_SECRET_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "unknown")
    monkeypatch.setenv("AWS_CONFIG_FILE", keys.environment()["AWS_CONFIG_FILE"])
    environment = {
        **real_minio.environment(),
        "TIDEGATE_S3_ACCESS_KEY": "unknown",
        **keys.environment(),
    }
    store = open_store(f"s3://{real_minio.bucket}/expiring", choose_task_keys(environment))
    store.put("a", b"1")
    first = keys.current
    keys.revoke(first)
    with pytest.raises(StoreDeniedError):
        store.put("a", b"2")
    keys.rotate()
    store.put("a", b"3")
    assert store.get("a").data == b"3"
    assert keys.was_handed_out(first)
    assert keys.was_handed_out(keys.current)


def test_a_profile_that_a_host_does_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting would not help, so the error is not a transient one."""
    (tmp_path / "config").write_text("")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    given = {"TIDEGATE_S3_ENDPOINT": "http://127.0.0.1:1", "TIDEGATE_EXECUTOR_S3_PROFILE": "nope"}
    store = open_store("s3://bucket/here", choose_task_keys(given))
    with pytest.raises(StoreDeniedError, match="nope"):
        store.get("a")
