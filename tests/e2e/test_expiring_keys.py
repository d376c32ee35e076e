"""A run in whose middle the keys of its tasks expire."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.drivers import Steady, wait_for
from tests.servers.expiring_keys import ExpiringKeys
from tests.servers.minio import RealMinio

# CI runs `test_the_keys_of_a_profile_are_renewed`.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_tasks_get_new_keys_in_the_middle_of_a_run(
    real_minio: RealMinio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has keys of its own, and its tasks need not be started again."""
    keys = ExpiringKeys(tmp_path / "keys", real_minio)
    for name, value in {**real_minio.environment(), **keys.environment()}.items():
        monkeypatch.setenv(name, value)
    pipeline = Steady(tmp_path / "p", 12, f"s3://{real_minio.bucket}/expiring-run")
    for file in sorted(pipeline.inbox.rglob("*")):
        if file.is_file():
            pipeline.store().upload(file, str(file.relative_to(pipeline.inbox)))
    driver = pipeline.start()
    try:
        wait_for(lambda: pipeline.log().head().slot >= 2, driver)
        first = keys.current
        keys.rotate()
        wait_for(lambda: keys.was_handed_out(keys.current), driver)
        keys.revoke(first)
        assert pipeline.log().head().slot < 12, "the run had ended before"
        assert driver.wait(timeout=600) == 0, pipeline.log_text()
    finally:
        driver.kill()
        driver.wait()
    assert keys.was_handed_out(first)
    assert pipeline.exact().problems == []
