"""Drivers that wait for the lease (`--standby`).

One takes over from a driver that is killed, and none from one that people have stopped.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.e2e.drivers import SIGKILLED, Steady, wait_for
from tidegate.checkpoints.lease import read_lease
from tidegate.jobs.cli.main import app
from tidegate.jobs.driver.startup import ALIVE_FILE

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


# In CI, a standby takes over under Airflow in `test_airflow_submit.py`.
@pytest.mark.long
def test_a_standby_takes_over(tmp_path: Path) -> None:
    """Its Spark is warm.

    After kill -9 of the driver it goes on from the newest checkpoint; the tables are exact.
    """
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
    first = next(f.epoch for f in log.epochs_between(0, before + 1, before + 1))
    sys.stdout.write(
        f"kill -9 to the next sealed epoch: {(first.created_at - killed) / 1e6:.1f} s\n"
    )
    assert first.created_at > killed
    assert steady.exact().problems == []


def test_a_stop_holds_until_a_person_starts(tmp_path: Path) -> None:
    """`tidegate stop` is obeyed by a warm standby and by a driver that a supervisor starts.

    A restore works; `start` ends it.

    And who has read its bounded sources to the end leaves no work to the other one.
    """
    steady = Steady(tmp_path, 16)
    held = hold_back(steady, 8)
    log = steady.log()
    driver = steady.start("", "--standby", "--work", str(tmp_path / "work"))
    wait_for(lambda: log.head().slot >= 3, driver)
    first_beat = (tmp_path / "work" / ALIVE_FILE).stat().st_mtime
    wait_for(lambda: (tmp_path / "work" / ALIVE_FILE).stat().st_mtime > first_beat, driver)
    standby = steady.start("", "--standby")
    wait_for(lambda: steady.said("standing_by", 2), standby)

    assert "has stopped" in tidegate(steady, "stop", "--why", "upgrade")
    assert driver.wait(timeout=120) == 0, steady.log_text(1)
    wait_for(lambda: steady.said("kept_waiting", 2), standby)
    restarted = steady.start("", "--standby")  # as a supervisor does, whatever the exit code was
    wait_for(lambda: steady.said("kept_waiting", 3), restarted)
    newest = next(f.epoch for f in log.epochs_between(0, 2, 2)).id
    assert "steady is at t0-000002" in tidegate(steady, "checkpoints restore", str(newest), "--yes")
    lease = read_lease(steady.store(), "steady")
    assert lease is not None
    assert lease.is_free
    assert (log.head().timeline, log.head().slot) == (1, 2), "the fork, and nothing after it"
    assert steady.said("standing_by", 3) == [], "no Spark for a stopped pipeline"

    for there, here in held:
        here.rename(there)
    assert "takes over" in tidegate(steady, "start")
    until(
        lambda: kept_by_the_driver(steady, 2) or kept_by_the_driver(steady, 3)
    )  # one ends, and one goes on waiting
    first, other = (restarted, standby) if kept_by_the_driver(steady, 2) else (standby, restarted)
    assert first.wait(timeout=120) == 0, steady.log_text(2) + steady.log_text(3)
    other.send_signal(signal.SIGTERM)
    assert other.wait(timeout=120) == 0, steady.log_text(2) + steady.log_text(3)
    assert steady.exact().problems == []


def until(true: Callable[[], object], seconds: float = 900.0) -> None:
    """Look until something is true, whichever process ends meanwhile."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def kept_by_the_driver(steady: Steady, launch: int) -> bool:
    """Whether a launch waits because another one has finished."""
    return any("set by driver" in line["why"] for line in steady.said("kept_waiting", launch))


def tidegate(steady: Steady, command: str, *rest: str) -> str:
    """What a person's command says."""
    done = CliRunner().invoke(app, [*command.split(), "steady", *rest, "--store", steady.store_url])
    assert done.exit_code == 0, done.output
    return done.output


def hold_back(steady: Steady, first: int) -> list[tuple[Path, Path]]:
    """Objects from a number on arrive later, so that the first driver cannot come to the end.

    (place, where it waits).
    """
    held = []
    for path in sorted((steady.inbox / "inbox").glob("*/*")):
        if path.name == "_DONE" or int(path.stem) >= first:
            aside = steady.folder / f"{path.parent.name}-{path.name}"
            path.rename(aside)
            held.append((path, aside))
    return held
