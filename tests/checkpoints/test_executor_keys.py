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
