"""The stack's memory of itself, and one real start and stop of all five processes."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.operators.history import make_spec
from tests.servers.airflow import ApiForTests

from tidegate.checkpoints.alert_delivery import find_alerts
from tidegate.errors import ConfigurationError
from tidegate.infra import stack_state
from tidegate.infra.airflow_processes import (
    AIRFLOW_COMPONENTS,
    COMPONENT_SETTINGS,
    IMPATIENT,
    PATIENT,
    AirflowApiError,
    build_airflow_settings,
    build_process_environment,
)
from tidegate.infra.local_processes import ProcessId, is_process_alive, read_start_ticks
from tidegate.infra.local_stack import NO_ALERTS, Stack, StackSettings, make_dags_folder
from tidegate.infra.stack_state import StackSecrets, StackState


def test_state_survives_the_command(tmp_path: Path) -> None:
    """What one command wrote the next one reads, with the same ids, ports and processes."""
    state = StackState(
        ports={"minio": 1}, processes={"minio": ProcessId(2, 3)}, airflow_digest="d", migrated="3"
    )
    state.save(tmp_path / "stack.json")
    assert StackState.load(tmp_path / "stack.json") == state


def test_processes_of_another_boot_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reboot pids and start ticks name strangers; ports are still wanted."""
    StackState(ports={"minio": 1}, processes={"minio": ProcessId(2, 3)}).save(
        tmp_path / "stack.json"
    )
    monkeypatch.setattr(stack_state, "read_boot_id", lambda: "another")
    state = StackState.load(tmp_path / "stack.json")
    assert state.processes == {}
    assert state.ports == {"minio": 1}


def test_secrets_are_made_once_and_kept_private(tmp_path: Path) -> None:
    """Only the owner can read them, the next command gets the same ones, and no repr shows any."""
    file = tmp_path / "credentials.json"
    made = StackSecrets.load_or_make(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert StackSecrets.load_or_make(file) == made
    assert sorted(made.airflow_passwords) == ["admin", "olga", "uwe", "vic"]
    assert repr(made) == "StackSecrets()"


@pytest.mark.parametrize("content", ["", "[]", '{"format": 99}', '{"format": 1}'])
def test_damaged_files_are_named(tmp_path: Path, content: str) -> None:
    """A file that is not ours is a configuration error with its path, for both files."""
    file = tmp_path / "stack.json"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=str(file)):
        StackState.load(file)
    with pytest.raises(ConfigurationError, match=str(file)):
        StackSecrets.load_or_make(file)


def test_everything_listens_on_loopback_only(tmp_path: Path) -> None:
    """Airflow's server is bound to 127.0.0.1, and the log servers, which cannot be, are off."""
    settings = build_airflow_settings(tmp_path, tmp_path, 1, StackSecrets.generate())
    assert settings["AIRFLOW__API__HOST"] == "127.0.0.1"
    assert "--skip-serve-logs" in AIRFLOW_COMPONENTS["scheduler"]
    assert "--skip-serve-logs" in AIRFLOW_COMPONENTS["triggerer"]


def test_only_the_server_that_waits_for_itself_gives_up_soon(tmp_path: Path) -> None:
    """Airflow's API server may wait for its own lock on SQLite.

    It ends before a heartbeat is missed. Others are patient.
    """
    settings = build_airflow_settings(tmp_path, tmp_path, 1, StackSecrets.generate())
    key = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS"
    assert settings[key] == settings[f"{key}_ASYNC"] == "tidegate.infra.airflow_processes.PATIENT"
    own = dict.fromkeys((key, f"{key}_ASYNC"), "tidegate.infra.airflow_processes.IMPATIENT")
    assert {"api-server": own} == COMPONENT_SETTINGS
    assert (
        IMPATIENT["timeout"]
        < int(settings["AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT"]) / 2
        < PATIENT["timeout"]
    )


def test_children_get_no_foreign_airflow_settings() -> None:
    """A user's own AIRFLOW variables and PYTHONPATH do not leak into the stack."""
    inherited = {
        "AIRFLOW_HOME": "/other",
        "AIRFLOW__CORE__EXECUTOR": "X",
        "PYTHONPATH": "/repo",
        "PATH": "/bin",
        "LANG": "C",
    }
    env = build_process_environment({"AIRFLOW_HOME": "/mine"}, inherited)
    assert env["AIRFLOW_HOME"] == "/mine"
    assert env["LANG"] == "C"
    assert env["PATH"].endswith(":/bin")
    assert "AIRFLOW__CORE__EXECUTOR" not in env
    assert "PYTHONPATH" not in env


def test_a_stack_that_never_ran(tmp_path: Path) -> None:
    """Its status says stopped, `down` does nothing, its addresses are a configuration error, not a
    traceback.
    """
    (tmp_path / "dags").mkdir()
    stack = Stack(StackSettings(home=tmp_path / "home", dags=tmp_path / "dags"))
    status = stack.status()
    assert not status.healthy
    assert set(status.processes.values()) == {"stopped"}
    assert status.airflow_url is None
    stack.down(lambda _: None)
    with pytest.raises(ConfigurationError, match="never up"):
        _ = stack.airflow_url


def test_a_missing_dags_folder_is_reported_before_anything_starts(tmp_path: Path) -> None:
    """Nothing is started or written when the DAGs folder does not exist."""
    stack = Stack(StackSettings(home=tmp_path / "home", dags=tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match="no DAGs folder"):
        stack.up(lambda _: None)
    assert not (tmp_path / "home").exists()


def test_a_folder_of_dags_is_made_where_there_is_none(tmp_path: Path) -> None:
    """With the files that build DAGs, and a place for specs; so the package alone is enough."""
    make_dags_folder(tmp_path / "dags")
    files = sorted(path.name for path in (tmp_path / "dags").iterdir())
    assert files == ["pipelines", "tidegate_dags.py", "tidegate_specs.py"]
    assert "build_dags(" in (tmp_path / "dags" / "tidegate_dags.py").read_text()


def test_a_stack_takes_a_receiver_of_alerts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow and its drivers find it, with the address of this Airflow for the links.

    Nothing starts while the variable with its address is not set.
    """
    (tmp_path / "dags").mkdir()
    settings = StackSettings(
        home=tmp_path / "home", dags=tmp_path / "dags", alerts=("slack", "HOOK")
    )
    stack = Stack(settings)
    with pytest.raises(ConfigurationError, match="the variable HOOK"):
        stack.up(lambda _: None)
    assert not settings.home.exists()
    monkeypatch.setenv("HOOK", "http://127.0.0.1/hook")
    StackState(ports={"airflow": 1, "minio": 2}).save(settings.home / "stack.json")
    found = Stack(settings).airflow_environment()
    assert found["HOOK"] == "http://127.0.0.1/hook"
    monkeypatch.setenv("TIDEGATE_ALERTS", found["TIDEGATE_ALERTS"])
    alerts = find_alerts(make_spec("p", ["a"]))
    assert alerts is not None
    assert (alerts.receivers, alerts.page) == ({"slack": "env:HOOK"}, "http://127.0.0.1:1")


def test_a_stack_keeps_its_receiver_of_alerts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of `up` without the option left it out, without a word."""
    monkeypatch.setenv("HOOK", "http://127.0.0.1/hook")
    StackState(ports={"airflow": 1, "minio": 2}).save(tmp_path / "stack.json")

    def go_up(alerts: tuple[str, str] | None) -> tuple[bool, list[str]]:
        stack, said = Stack(StackSettings(home=tmp_path, alerts=alerts)), list[str]()
        stack._note_alerts(said.append)
        return "TIDEGATE_ALERTS" in stack.airflow_environment(), said

    assert go_up(("slack", "HOOK")) == (True, [])
    has_receiver, (said,) = go_up(None)
    assert has_receiver
    assert said.startswith("alerts go to slack ($HOOK) as before")
    assert go_up(NO_ALERTS) == (False, [])
    assert go_up(None) == (False, [])


# The driver of a pipeline in small: a task that leaves a process of its own session behind.
_DAG = """
import subprocess, sys
from airflow.sdk import dag, task

@dag(schedule=None)
def leaves():
    @task
    def start():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("CHILD", child.pid)
    start()
leaves()
"""


@pytest.mark.airflow
@pytest.mark.minio
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_up_again_and_down(tmp_path: Path) -> None:
    """The stack comes up well, adopts what runs, replaces what was killed, runs a DAG, and takes
    everything down with it.
    """
    dags = tmp_path / "dags"
    dags.mkdir()
    (dags / "leaves.py").write_text(_DAG)
    stack = Stack(StackSettings(home=tmp_path / "home", dags=dags))
    lines: list[str] = []
    try:
        first = stack.up(lines.append)
        assert first.healthy
        before = StackState.load(tmp_path / "home" / "stack.json").processes
        os.kill(before["triggerer"].pid, 9)
        assert stack.up(lines.append).healthy
        after = StackState.load(tmp_path / "home" / "stack.json").processes
        assert {name for name in before if before[name] != after[name]} == {"triggerer"}

        assert _listening(after) == {"127.0.0.1", "::1"}

        api = ApiForTests.of(stack)
        api.wait_for_dag("leaves")
        api.unpause("leaves")
        run = api.trigger_dag("leaves")
        assert api.wait_for_run("leaves", run, timeout=600)["state"] == "success"
        log = api.read_task_log("leaves", run, "start")
        assert "CHILD" in log
        assert api.import_errors() == {}
        with pytest.raises(AirflowApiError, match="403"):
            stack.airflow_api("vic").trigger_dag("leaves")
    finally:
        stack.down(lines.append)
    child = int(log.split("CHILD ")[1].split()[0])
    assert read_start_ticks(child) is None
    assert not any(is_process_alive(mark) for mark in after.values())
    assert set(stack.status().processes.values()) == {"stopped"}
    _check_no_secret_leaked(stack)


def _listening(marks: dict[str, ProcessId]) -> set[str]:
    """The addresses on which the processes and their children listen."""
    leaders = [psutil.Process(mark.pid) for mark in marks.values()]
    found = set()
    for process in [
        *leaders,
        *(child for leader in leaders for child in leader.children(recursive=True)),
    ]:
        with suppress(psutil.NoSuchProcess):  # Airflow parses in children that come and go
            found |= {
                socket.laddr.ip
                for socket in process.net_connections("tcp")
                if socket.status == psutil.CONN_LISTEN
            }
    return found


def _check_no_secret_leaked(stack: Stack) -> None:
    keys = StackSecrets.load_or_make(stack.credentials_file)
    secrets = [
        *keys.airflow_passwords.values(),
        keys.minio_root.secret_key,
        keys.minio_app.secret_key,
        keys.jwt_secret,
    ]
    logs = [path.read_text(errors="replace") for path in stack.home.rglob("*.log")]
    assert logs
    assert not [secret for secret in secrets for text in logs if secret in text]
