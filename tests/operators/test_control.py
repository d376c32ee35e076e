from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.manual_clock import ManualClock, set_desired_at
from tests.operators.clocks import World
from tests.operators.conftest import Wait
from tests.servers.alert_receivers import running
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.deployed_specs import (
    Deploy,
    confirm_deploy,
    list_deploy_warnings,
    make_copy,
    write_copy,
)
from tidegate.checkpoints.driver_reports import DriverStatus, write_status
from tidegate.checkpoints.driver_requests import (
    DesiredState,
    RequestKind,
    end_abandoned_recovery,
    list_pending_requests,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import Lease, read_lease
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.store import Store, StoredObject
from tidegate.errors import PoisonError
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.loader import load_any_spec
from tidegate.operators import sweep_operator
from tidegate.operators.driver_shutdown import (
    StopOrder,
    StopTimeouts,
    stop_driver,
    terminate_driver,
)
from tidegate.operators.sweep_operator import (
    StopOperator,
    SweepOperator,
    SweepReportOperator,
    decide_start,
)

ELSEWHERE = ProcessIdentity(
    driver="d", host="elsewhere", boot="b", namespace="n", pid=7, start_ticks=9
)


def test_a_listening_driver_is_asked_and_drains() -> None:
    """The request names the driver's token; nothing harder is needed."""
    store, clock = MemoryStore(), World(lambda: None)
    lease = Lease.acquire(store, "p", ELSEWHERE, clock=clock)

    def driver() -> None:
        if any(
            r.kind is RequestKind.DRAIN and r.token == lease.token
            for r in list_pending_requests(store, "p")
        ):
            lease.release()

    clock.meanwhile = driver
    assert (
        stop_driver(store, "p", StopOrder("ann", "test"), clock=clock)
        == "the driver drained and stopped by itself"
    )


def test_a_deaf_driver_elsewhere_loses_its_lease() -> None:
    """No signal reaches another host, so the lease goes to no one under a higher token."""
    store, clock = MemoryStore(), World(lambda: None)
    lease = Lease.acquire(store, "p", ELSEWHERE, clock=clock)
    clock.meanwhile = lease.renew
    said = stop_driver(
        store, "p", StopOrder("ann", "test", timeouts=StopTimeouts(request=3)), clock=clock
    )
    view = read_lease(store, "p")
    assert "taken away" in said
    assert "runs next to the next driver" in said  # two Spark applications until then
    assert view is not None
    assert (view.holder, view.token) == (None, lease.token + 1)


def test_only_the_lost_driver_is_terminated() -> None:
    """A driver that took over after the look keeps its lease, for example a standby."""
    store = MemoryStore()
    lost = Lease.acquire(store, "p", ELSEWHERE)
    lost.release()
    successor = Lease.acquire(store, "p", ELSEWHERE)
    assert terminate_driver(store, "p", lost.token, print) == "no driver was running"
    successor.ensure_held()
    successor.renew()


_DEAF_DRIVER = """\
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
jvm = subprocess.Popen(["sleep", "600"])
os.kill(jvm.pid, signal.SIGSTOP)
print(jvm.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("run_id", ["manual__2026-11-28T10:00:00+00:00", "stop~1", "x" * 250])
def test_a_stop_asks_the_driver_whatever_its_run_is_called(
    empty_store: Store, monkeypatch: pytest.MonkeyPatch, run_id: str
) -> None:
    """Airflow allows characters that a key may not have. The wish alone would stop no driver."""
    clock = World(lambda: None)
    monkeypatch.setattr(sweep_operator, "stop_driver", partial(stop_driver, clock=clock))
    set_desired_state(empty_store, "p", DesiredState.RUN, who="ann")
    lease = Lease.acquire(empty_store, "p", ELSEWHERE, clock=clock)
    asked: list[str] = []

    def drain() -> None:
        asked.extend(request.id for request in list_pending_requests(empty_store, "p"))
        lease.release()

    clock.meanwhile = drain
    stop = StopOperator(task_id="stop", pipeline="p", reason="r", replace="False")
    context = {"run_id": run_id, "dag_run": SimpleNamespace(triggering_user_name="ann")}
    assert stop.execute(context)["said"] == "the driver drained and stopped by itself"
    assert len(asked) == 1
    assert read_desired_state(empty_store, "p").state is DesiredState.STOPPED


def test_a_hung_jvm_does_not_outlive_its_driver(wait_until: Wait) -> None:
    """Both are killed, as both are in the session in which a launcher starts a driver."""
    command = [sys.executable, "-c", _DEAF_DRIVER]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert driver.stdout is not None
    jvm = int(driver.stdout.readline())
    store = MemoryStore()
    Lease.acquire(store, "p", ProcessIdentity.of_process(driver.pid))
    order = StopOrder("ann", "test", timeouts=StopTimeouts(0.0, 0.1, 30.0))
    assert stop_driver(store, "p", order) == "the driver ended after SIGKILL"
    driver.communicate()
    wait_until(lambda: not Path(f"/proc/{jvm}").exists())


def test_without_a_driver_there_is_nothing_to_stop() -> None:
    """A free lease ends it at once; no request is left behind for a successor."""
    store = MemoryStore()
    assert (
        stop_driver(store, "p", StopOrder("ann", "test"), clock=ManualClock())
        == "no driver was running"
    )
    assert list_pending_requests(store, "p") == []


def _failed(store: MemoryStore, kind: str) -> None:
    body = {"state": "failed", "error": {"class": kind, "message": "row 7"}}
    write_status(store, "p", DriverStatus(token=1, driver="d", step="x", at=0, body=body))


@pytest.mark.parametrize(
    ("desired", "watched", "failed", "expected"),
    [
        (DesiredState.STOPPED, False, None, (False, "desired: stopped")),
        (DesiredState.RUN, True, None, (False, "a run cares for it")),
        (DesiredState.RUN, False, None, (True, "should run and does not: starting it")),
        (DesiredState.RUN, False, "transient", (True, "should run and does not: starting it")),
        (DesiredState.RUN, False, "poison", (False, "waits for a person: row 7")),
    ],
)
def test_the_sweep_starts_only_what_should_run(
    desired: DesiredState, watched: bool, failed: str | None, expected: tuple[bool, str]
) -> None:
    """What a person stopped, what a run cares for, and what only a person can mend is left alone."""
    store = MemoryStore()
    set_desired_state(store, "p", desired, who="ann")
    if failed:
        _failed(store, failed)
    assert decide_start(store, "p", watched=watched) == expected


def test_an_abandoned_recovery_ends() -> None:
    """A recovery whose process was killed keeps the stream down for a quarter of an hour, not for
    ever.
    """
    store, clock = MemoryStore(), ManualClock()
    set_desired_at(clock, store, "p", DesiredState.RECOVERING, who="ann")
    clock.advance(14 * 60)
    assert end_abandoned_recovery(store, "p", who="sweep", clock=clock).keeps_drivers_away
    clock.advance(2 * 60)
    for _ in range(2):  # a second sweep finds nothing to do
        ended = end_abandoned_recovery(store, "p", who="sweep", clock=clock)
        assert (ended.state, ended.revision) == (DesiredState.RUN, 2)
    assert decide_start(store, "p", watched=False)[0]


class ClockedStore(MemoryStore):
    """A store with a clock of its own, as S3 has."""

    age = 0.0

    def get(self, key: str) -> StoredObject:
        """Read an object, with its age."""
        return replace(super().get(key), age=self.age)


def test_a_host_with_a_wrong_clock_ends_no_recovery() -> None:
    """A host whose clock is an hour behind looks first: the restore still has its 15 minutes."""
    store, clock = ClockedStore(), ManualClock()
    behind = ManualClock(wall_ticks=clock.wall_ticks() - 3_600_000_000)
    set_desired_at(clock, store, "p", DesiredState.RECOVERING, who="ann")
    for one in (behind, clock):
        assert end_abandoned_recovery(store, "p", who="sweep", clock=one).keeps_drivers_away
    store.age = 901.0
    assert not end_abandoned_recovery(store, "p", who="sweep", clock=behind).keeps_drivers_away


def test_a_driver_without_a_run_is_given_one() -> None:
    """Its run was deleted, or ended while the triggerer was down: the new run adopts it."""
    store = MemoryStore()
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    Lease.acquire(store, "p", ELSEWHERE)
    assert decide_start(store, "p", watched=False) == (
        True,
        "a driver runs without a run: giving it one",
    )


def test_one_unreadable_pipeline_does_not_stop_the_sweep(empty_store: Store) -> None:
    """The others are started, and another task fails with the name of the unreadable one."""
    for name in ("a", "b", "c"):
        set_desired_state(empty_store, name, DesiredState.RUN, who="ann")
    empty_store.put(BucketLayout("a").desired_key, b'{"field_of_a_newer_version": 1}')
    kept: dict[str, Any] = {}
    task = SimpleNamespace(
        get_dr_count=lambda **_: 0,
        xcom_push=lambda key, value: kept.update({key: value}),
        xcom_pull=lambda task_ids, key: kept[key],
    )
    sweep = SweepOperator(task_id="look", pipelines=["a", "b", "c"])
    assert sweep.execute({"ti": task}) == ["b.stream", "c.stream"]
    with pytest.raises(PoisonError, match="the sweep could not judge a: "):
        SweepReportOperator(task_id="report").execute({"ti": task})


def test_the_sweep_announces_what_no_driver_can(
    empty_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a driver is gone. A receiver that is away does not turn the sweep red."""
    earlier = ManualClock(wall_ticks=SYSTEM_CLOCK.wall_ticks() - 180_000_000)
    set_desired_at(earlier, empty_store, "p", DesiredState.RUN, who="ann")
    alerts = {"slack": "env:SLACK_WEBHOOK_URL"}
    fields = {"kind": "job", "name": "p", "app": "a.py", "supervision": {"alerts": alerts}}
    report = SweepReportOperator(task_id="report", specs=[JobSpec.model_validate(fields)])
    task = SimpleNamespace(xcom_pull=lambda **_: {})
    with running() as receivers:
        monkeypatch.setenv("SLACK_WEBHOOK_URL", receivers.environment["SLACK_WEBHOOK_URL"])
        receivers.answers = [503]
        for _ in range(3):
            report.execute({"ti": task})
    assert [body["text"].partition("\n")[0] for _, body in receivers.taken] == [
        "*[critical] p: it should run, and no driver runs*"
    ]


def test_a_defect_in_announcing_does_not_fail_the_sweep(
    empty_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what the sweep found would not be reported."""
    alerts = {"slack": "env:SLACK_WEBHOOK_URL"}
    fields = {"kind": "job", "name": "p", "app": "a.py", "supervision": {"alerts": alerts}}
    report = SweepReportOperator(task_id="report", specs=[JobSpec.model_validate(fields)])
    task = SimpleNamespace(xcom_pull=lambda **_: {"a": "damaged"})

    def fail(*_: object) -> None:
        raise KeyError("of_tomorrow")

    monkeypatch.setattr(sweep_operator, "announce_incidents", fail)
    with pytest.raises(PoisonError, match="damaged"):
        report.execute({"ti": task})


def test_the_sweep_notes_in_what_files_differ(empty_store: Store, tmp_path: Path) -> None:
    """For a page without a checkout. A file that is broken keeps no other from being compared."""
    copies = {}
    for name in ("a", "b"):
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"apiVersion: tidegate/v1\nkind: job\nname: {name}\napp: job.py\n")
        copies[name] = make_copy(load_any_spec(file), {"job.py": "x = 1\n"})
        write_copy(empty_store, name, copies[name])
        confirm_deploy(empty_store, name, Deploy(digest=copies[name].digest, who="ann", at=1))
    (tmp_path / "job.py").write_text("x = 2\n")
    (tmp_path / "a.yaml").write_text("name: [\n")
    files = [str(tmp_path / f"{name}.yaml") for name in ("a", "b")]
    report = SweepReportOperator(task_id="report", files=files)
    report.execute({"ti": SimpleNamespace(xcom_pull=lambda **_: {})})
    assert list_deploy_warnings(empty_store, "a", None, {}) == []
    (says,) = list_deploy_warnings(empty_store, "b", None, {})
    assert "code job.py: 1 lines added, 1 removed" in says
