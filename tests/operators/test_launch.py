from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.errors import ConfigurationError
from tidegate.operators.child_processes import run_child
from tidegate.operators.driver_launch import (
    LaunchedDriver,
    delete_old_attempts,
    launch_driver,
    make_driver_folder,
    send_signal,
    start_detached,
    tail_log_file,
)
from tidegate.operators.pipeline_operator import PipelineOperator
from tidegate.operators.store_access import StoreAccess, build_child_environment

Wait = Callable[..., None]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches leave their files below the test's folder."""
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))


def _launch(tmp_path: Path, script: str) -> LaunchedDriver:
    command = shlex.join([sys.executable, "-c", script])
    with patch.dict(os.environ, TIDEGATE_DRIVER=command):
        return launch_driver("p", str(tmp_path / "p.yaml"), StoreAccess(str(tmp_path)), "latest")


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
    assert LaunchedDriver(**started.as_dict()) == started


def test_a_killed_driver_differs_from_a_failed_one(tmp_path: Path, wait_until: Wait) -> None:
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


def test_the_file_with_the_keys_goes_with_its_driver(tmp_path: Path, wait_until: Wait) -> None:
    """spark-submit reads its properties once; nothing leaves the store's keys on the worker."""
    folder = make_driver_folder("p")
    keys = folder / "a.conf"
    keys.write_text("spark.yarn.appMasterEnv.TIDEGATE_S3_SECRET_KEY hush")
    started = start_detached(folder, "a", [sys.executable, "-c", ""], {"PATH": os.defpath})
    wait_until(lambda: started.read_exit_code() == 0)
    assert not keys.exists()


def test_logs_of_drivers_are_private() -> None:
    """They quote rows and addresses, and other users of the host may not look into the folder."""
    assert make_driver_folder("private").stat().st_mode & 0o077 == 0


def test_old_attempts_leave_no_files(tmp_path: Path, wait_until: Wait) -> None:
    """The newest stay, and those whose driver still runs."""
    script = "import sys, time; time.sleep(600 * ('0' in sys.argv[1]))"
    launched = []
    for name in ("0", "1", "2", "3"):
        command = [sys.executable, "-c", script, name]
        launched.append(start_detached(tmp_path, name, command, {"PATH": os.defpath}))
        if name != "0":
            wait_until(lambda: launched[-1].read_exit_code() is not None)
    delete_old_attempts(tmp_path, keep=2)
    assert {path.stem for path in tmp_path.iterdir()} == {"0", "2", "3"}
    send_signal(launched[0].leader, signal.SIGTERM, group=True)
    wait_until(lambda: not launched[0].is_alive())
    delete_old_attempts(tmp_path, keep=2)
    assert {path.stem for path in tmp_path.iterdir()} == {"2", "3"}


def test_a_driver_of_another_host_keeps_its_keys_while_it_starts(tmp_path: Path) -> None:
    """Its spark-submit may not have read them yet; that it has ended cannot be seen from here."""
    leader = ProcessIdentity.this_process().model_copy(update={"host": "elsewhere"})
    driver = LaunchedDriver("a", str(tmp_path / "a.log"), leader, str(tmp_path / "a.exit"))
    record, keys = tmp_path / "a.json", tmp_path / "a.conf"
    record.write_text(json.dumps(driver.as_dict()))
    keys.touch()
    delete_old_attempts(tmp_path)
    assert keys.exists()
    os.utime(record, (1.0, 1.0))
    delete_old_attempts(tmp_path)
    assert not keys.exists()


def test_a_killed_task_leaves_no_command_behind(tmp_path: Path, wait_until: Wait) -> None:
    """Airflow calls `on_kill` in the task's main thread, in which the command is waited for."""
    script = (
        f"import pathlib, time; pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(600)"
    )
    with ThreadPoolExecutor(1) as pool:
        command = [sys.executable, "-c", script]
        task = pool.submit(run_child, StoreAccess(str(tmp_path)), command, timeout=None)
        wait_until((tmp_path / "up").exists)
        PipelineOperator(task_id="t", pipeline="p").on_kill()
        assert task.result(timeout=30).returncode == -signal.SIGKILL


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


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("{kind: job, name: p, app: clicks.py}", "tidegate.jobs.sealed_queries"),
        ("name: p", "tidegate.jobs.driver"),  # the driver reports what is wrong with it
    ],
)
def test_a_job_has_a_driver_of_its_own(
    tmp_path: Path, text: str, module: str, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kind of the spec decides which program is launched."""
    monkeypatch.delenv("TIDEGATE_DRIVER", raising=False)
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    spec = tmp_path / "p.yaml"
    spec.write_text(text)
    started = launch_driver("p", str(spec), StoreAccess(str(tmp_path)), "latest")
    wait_until(lambda: started.read_exit_code() is not None)
    assert tail_log_file(started.log)[0].startswith(f"-m {module} {spec} --store")
