"""A driver that stands by takes over from one that is killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.e2e.drivers import SIGKILLED, Steady, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_standby_takes_over(tmp_path: Path) -> None:
    """Its Spark is warm: after kill -9 of the driver it goes on from the newest checkpoint; the tables are exact."""
    steady = Steady(tmp_path, 16)
    held = hold_back(steady, 8)
    log = steady.log()
    driver = steady.start()
    wait_for(lambda: log.head().slot >= 2, driver)
    standby = steady.start("", "--standby")
    wait_for(lambda: steady.said("standing_by"), standby)
    driver.kill()
    assert driver.wait() == SIGKILLED
    before, killed = log.head().slot, time.time_ns() // 1000
    for there, here in held:
        here.rename(there)
    assert standby.wait(timeout=900) == 0, steady.log_text()
    first = next(f.epoch for f in log.epochs(0, before + 1, before + 1))
    sys.stdout.write(f"kill -9 to the next sealed epoch: {(first.created_at - killed) / 1e6:.1f} s\n")
    assert first.created_at > killed
    assert steady.exact().problems == []


def hold_back(steady: Steady, first: int) -> list[tuple[Path, Path]]:
    """Objects from a number on arrive later, so that the first driver cannot come to the end; (place, where it waits)."""
    held = []
    for path in sorted((steady.inbox / "inbox").glob("*/*")):
        if path.name == "_DONE" or int(path.stem) >= first:
            aside = steady.folder / f"{path.parent.name}-{path.name}"
            path.rename(aside)
            held.append((path, aside))
    return held
