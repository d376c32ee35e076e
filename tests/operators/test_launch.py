from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tidegate.checkpoints.process_identity import ProcessIdentity
from tidegate.errors import ConfigurationError
from tidegate.operators.driver_launch import (
    LaunchedDriver,
    LocalLauncher,
    send_signal,
    tail_log_file,
)
from tidegate.operators.store_access import StoreAccess, build_child_environment

Wait = Callable[..., None]


def _launch(tmp_path: Path, script: str) -> LaunchedDriver:
    launcher = LocalLauncher(tmp_path / "drivers", [sys.executable, "-c", script])
    return launcher.launch("p", str(tmp_path / "p.yaml"), StoreAccess(str(tmp_path)), "latest")


def test_a_launched_driver_leads_a_group_and_leaves_its_exit_code(
    tmp_path: Path, wait_until: Wait
) -> None:
    """The process outlives its starter's session, its output and exit code are found in files."""
    started = _launch(tmp_path, "import sys; print('hello', sys.argv[1:]); sys.exit(3)")
    wait_until(lambda: started.read_exit_code() is not None)
    assert started.read_exit_code() == 3
    assert not started.is_alive()
    assert "hello" in tail_log_file(started.log)[0]
    assert "--recover-to" in tail_log_file(started.log)[0]
    assert LaunchedDriver.from_dict(started.as_dict()) == started


def test_a_killed_driver_is_told_from_a_failed_one(tmp_path: Path, wait_until: Wait) -> None:
    """kill -9 shows as 137, which no driver chooses.

    A signal to a process that is no longer itself is refused.
    """
    started = _launch(
        tmp_path,
        "import os; open('pid', 'w').write(str(os.getpid())); import time; time.sleep(600)",
    )
    pid_file = Path(started.log).parent / "pid"
    wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
    assert started.is_alive()
    stranger = started.leader.model_copy(update={"start_ticks": 1})
    assert not send_signal(stranger, signal.SIGKILL)
    assert started.is_alive()
    assert send_signal(started.leader, signal.SIGTERM, group=True)
    wait_until(lambda: started.read_exit_code() is not None)
    assert started.read_exit_code() == 128 + signal.SIGTERM


def test_signals_never_reach_a_process_of_another_host() -> None:
    """A pid means nothing outside its host, boot and namespace."""
    elsewhere = ProcessIdentity.this_process().model_copy(update={"host": "elsewhere"})
    assert not send_signal(elsewhere, signal.SIGTERM)


def test_a_driver_does_not_inherit_airflow_s_secrets() -> None:
    """Airflow's settings stay behind; the store's keys go into the environment and nowhere else."""
    access = StoreAccess("s3://b", {"TIDEGATE_S3_SECRET_KEY": "hush"})
    inherited = {
        "PATH": "x",
        "AIRFLOW__API_AUTH__JWT_SECRET": "s",
        "_AIRFLOW_PROCESS_CONTEXT": "client",
        "PYTHONPATH": "y",
    }
    env = build_child_environment(access, inherited)
    assert env == {
        "PATH": "x",
        "TIDEGATE_STORE": "s3://b",
        "PYTHONUNBUFFERED": "1",
        "TIDEGATE_S3_SECRET_KEY": "hush",
    }
    assert "hush" not in repr(access)


def test_without_a_store_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing address is a configuration error, not a traceback from deep below."""
    monkeypatch.delenv("TIDEGATE_STORE", raising=False)
    with pytest.raises(ConfigurationError, match="TIDEGATE_STORE"):
        StoreAccess.resolve()
