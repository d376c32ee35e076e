"""What each role of `tidegate.infra.policies` has to be able to do, done for real, with its keys,
on a real MinIO.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred
from tests.cli.conftest import Cli
from tests.cli.shop import OBJECTS, SPEC, Shop
from tests.operators.supervising import Memory, NotingLauncher
from tests.servers.minio import RealMinio

from tidegate.checkpoints.driver_reports import DriverStatus, write_status
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.store import StoreDeniedError
from tidegate.checkpoints.store_probe import require_honest_store
from tidegate.infra.policies import Role, build_policy
from tidegate.infra.provision import Credentials, grant_policy
from tidegate.jobs.driver.backfill import make_batch_spec
from tidegate.jobs.driver.landing_log import LandingLog
from tidegate.jobs.rows.attempt_files import open_task_store
from tidegate.jobs.spark.local_session import LocalSession
from tidegate.jobs.spark.mover import SparkMover
from tidegate.jobs.spec.loader import load_spec
from tidegate.jobs.spec.operations import SupervisionSpec
from tidegate.operators import recover_and_pin, stream_operator
from tidegate.operators.child_operators import MaintainOperator
from tidegate.operators.recover_and_pin import PinOperator, RecoverOperator, ReportRestoreOperator
from tidegate.operators.stream_operator import StreamOperator
from tidegate.operators.sweep_operator import StopOperator, SweepOperator

pytestmark = pytest.mark.minio

LANDED = """\
apiVersion: tidegate/v1
name: shop
sources:
  web:
    path: inbox/web/
    schema: {at: timestamp, item: string, price: long}
    event_time: at
    lag: 0s
    landing: {format: rate, columns: {at: timestamp, item: "'tea'", price: value}, every: 1s}
"""
Become = Callable[[Role], str]


@pytest.fixture
def become(
    real_minio: RealMinio, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Become:
    """Have the environment hold the keys of a role for the pipeline `shop`.

    Says where its store is. The input is there.
    """
    prefix = secrets.token_hex(4)
    url = f"s3://{real_minio.bucket}/{prefix}"
    (tmp_path / "shop.yaml").write_text(SPEC)
    for name, value in real_minio.environment().items():
        monkeypatch.setenv(name, value)
    whole = Shop(open_store(url), load_spec(tmp_path / "shop.yaml"), tmp_path / "work")
    for number, rows in enumerate(OBJECTS):
        whole.put(number, rows)

    def change(role: Role) -> str:
        own = Credentials.generate(role.value)
        rights = build_policy(role, real_minio.bucket, "shop", prefix=prefix, inputs=["inbox/web/"])
        grant_policy(
            real_minio.server.endpoint, real_minio.server.root, real_minio.bucket, own, rights
        )
        monkeypatch.setenv("TIDEGATE_STORE", url)
        monkeypatch.setenv("TIDEGATE_S3_ACCESS_KEY", own.access_key)
        monkeypatch.setenv("TIDEGATE_S3_SECRET_KEY", own.secret_key)
        return url

    return change


def shop_of(url: str, folder: Path) -> Shop:
    """The pipeline with the keys of the moment."""
    return Shop(open_store(url), load_spec(folder / "shop.yaml"), folder / "work")


def done(cli: Cli, *command: str) -> str:
    """What a command said that must succeed."""
    said = cli(*command)
    assert said.exit_code == 0, f"{command}: {said.out} {said.err}"
    return said.out


def asked(cli: Cli, *command: str) -> str:
    """The id of a new splice request."""
    said = cli("splice", *command, "--json")
    assert said.exit_code == 0, said.err
    return str(said.data["request"])


def test_driver_and_airflow(become: Become, cli: Cli, tmp_path: Path) -> None:
    """A driver's keys are enough for the driver and for all that Airflow's tasks do.

    One key pair serves an Airflow.
    """
    url = become(Role.DRIVER)
    store = open_store(url)
    require_honest_store(store)
    shop = shop_of(url, tmp_path)
    shop.run()
    done(cli, "checkpoints", "pin", "shop", "latest", "kept")
    done(cli, "splice", "merge", "shop.yaml", asked(cli, "late", "shop.yaml"), "--yes")
    assert shop.exact() == []
    done(cli, "checkpoints", "restore", "shop.yaml", "kept", "--yes")
    shop_of(url, tmp_path).run()
    assert shop.exact() == []
    for number in range(25):
        store.put(f"shop/logs/2026{number:04d}-aa/000000.log", b"x")
    found = MaintainOperator(task_id="maintain", pipeline="shop", spec="shop.yaml").execute({})
    assert found["scrubbed"] > 0
    assert found["logs_forgotten"] > 0
    swept = Retention(
        shop.log, RetentionPolicy(keep_last=1, keep_for=0, grace=0), external=lambda: ()
    ).run()
    assert swept.retired
    assert swept.deleted
    day = datetime(2026, 5, 1, tzinfo=UTC)
    batch = make_batch_spec(shop.spec, (day, day.replace(day=2)), tmp_path).name
    store.put(f"{batch}/status.json", b"{}")
    for entry in list(store.list_objects(f"{batch}/")):
        store.delete(entry.key)
    with pytest.raises(StoreDeniedError):
        store.put("inbox/web/9.parquet", b"x")


@pytest.mark.parametrize("left_over", [False, True])
def test_airflow_from_the_first_start(
    become: Become, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_over: bool
) -> None:
    """Each of Airflow's tasks does its work with a driver's keys, from an empty bucket on.

    Or from one in which a driver's report has outlived its lease.
    """
    url = become(Role.DRIVER)
    store = open_store(url)
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / "home"))
    for module in (stream_operator, recover_and_pin):
        monkeypatch.setattr(module, "launch_driver", NotingLauncher.launch)
    monkeypatch.setattr(RecoverOperator, "_await_first_epoch", lambda *_, **__: 1.0)
    about: dict[str, Any] = {"pipeline": "shop", "spec": str(tmp_path / "shop.yaml")}
    person = SimpleNamespace(triggering_user_name="ann")
    pushed: dict[str, Any] = {}
    task = SimpleNamespace(
        get_dr_count=lambda **_: 1,
        max_tries=2,
        xcom_push=lambda key, value: pushed.update({key: value}),
    )
    context = {"run_id": "r", "ti": task, "dag_run": person, "task_state_store": Memory()}
    if left_over:
        write_status(store, "shop", DriverStatus(token=1, driver="d", step="wait", at=1))
    with pytest.raises(TaskDeferred):
        StreamOperator(task_id="stream", supervision=SupervisionSpec(), **about).execute(context)
    shop_of(url, tmp_path).run()
    SweepOperator(task_id="look", pipelines=["shop"]).execute(context)
    assert not any(pushed.values())
    chosen: dict[str, Any] = {"checkpoint": "latest", "reason": "a test", "dry_run_only": "False"}
    pin: dict[str, Any] = {
        "action": "pin",
        "checkpoint": "latest",
        "name": "kept",
        "reason": "a test",
    }
    ReportRestoreOperator(task_id="report", **chosen, **about).execute(context)
    assert PinOperator(task_id="pin", **pin, **about).execute(context)["pins"]
    assert RecoverOperator(task_id="recover", **chosen, **about).execute(context)["timeline"] == 1
    stop = StopOperator(task_id="stop", reason="a test", replace="False", **about)
    assert stop.execute(context)["said"] == "no driver was running"


@pytest.fixture
def no_task_stores() -> Iterator[None]:
    """Tasks open their stores with the keys of this test, which the next test does not see."""
    open_task_store.cache_clear()
    yield
    open_task_store.cache_clear()


@pytest.mark.usefixtures("no_task_stores")
def test_executors(
    become: Become, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks compute a pipeline with keys that write rows, and no slot, lease or other document."""
    url = become(Role.EXECUTOR)
    for name in ("ACCESS_KEY", "SECRET_KEY"):
        monkeypatch.setenv(f"TIDEGATE_EXECUTOR_S3_{name}", os.environ[f"TIDEGATE_S3_{name}"])
    become(Role.DRIVER)
    spec = load_spec(tmp_path / "shop.yaml")
    mover = SparkMover(open_store(url), spec, tmp_path / "spark", LocalSession())  # type: ignore[arg-type]
    shop = Shop(open_store(url), spec, tmp_path / "work", mover)
    shop.run()
    mover.close()
    assert shop.exact() == []
    tasks, driver = open_task_store(url), open_store(url)
    state = next(iter(driver.list_objects("shop/timelines/0/state/"))).key
    assert tasks.get(state).data == driver.get(state).data
    slot = shop.log.head().slot
    documents = [
        shop.log.layout.slot_key(0, slot),
        shop.log.layout.slot_key(0, slot + 1),
        "shop/lease.json",
        "shop/desired.json",
        "shop/requests/r.json",
        "shop/iceberg/current.json",
        "inbox/web/0000.parquet",
    ]
    for key in [*documents, state]:
        with pytest.raises(StoreDeniedError):
            tasks.delete(key)
    for key in documents:
        with pytest.raises(StoreDeniedError):
            tasks.put(key, b"x")
    tasks.put(f"{state}.more", b"x")


def test_operator(become: Become, cli: Cli, tmp_path: Path) -> None:
    """People look, ask, decide, pin, stop and restore with keys that write no row and delete none."""
    url = become(Role.DRIVER)
    shop_of(url, tmp_path).run()
    become(Role.OPERATOR)
    for command in ("status shop", "checkpoints list shop", "checkpoints show shop latest", "checkpoints verify shop --deep",
                    "checkpoints pin shop latest kept", "storage shop.yaml", "tables shop.yaml events", "check shop.yaml",
                    "row shop.yaml price=3", "support-bundle shop.yaml", "gc shop.yaml --dry-run",
                    "stop shop", "start shop"):  # fmt: skip
        done(cli, *command.split())
    assert cli("savepoint", "shop", "mine", "--wait", "0").exit_code == 3  # asked; no one drives
    request = asked(cli, "late", "shop.yaml")
    done(cli, "splice", "show", "shop.yaml", request)
    done(cli, "splice", "part", "shop.yaml", request, "--until", "2026-05-01T11:00:00Z")
    done(cli, "splice", "reject", "shop.yaml", f"{request}-rest")
    done(cli, "splice", "list", "shop.yaml")
    said = cli("splice", "merge", "shop.yaml", f"{request}-part", "--yes")
    assert (said.exit_code, "refuses" in said.err) == (2, True)
    newest = shop_of(url, tmp_path).log.head().checkpoint
    done(cli, "checkpoints", "restore", "shop.yaml", str(newest), "--yes")
    done(cli, "checkpoints", "unpin", "shop", "kept")
    store = open_store(url)
    for key in (
        "shop/identity.json",
        "shop/timelines/0/tables/events/x",
        "inbox/web/0000.parquet",
        "shop/quality/history.json",
        "shop/approvals/s1.json",
    ):
        for change in (lambda key=key: store.put(key, b"x"), lambda key=key: store.delete(key)):
            with pytest.raises(StoreDeniedError):
                change()
    become(Role.DRIVER)
    driver = shop_of(url, tmp_path)
    driver.run()
    done(cli, "splice", "merge", "shop.yaml", f"{request}-part", "--yes")
    assert driver.exact() == []


def test_lander(become: Become, tmp_path: Path) -> None:
    """Landing claims, writes and goes on with keys that neither read a row nor see the pipeline."""
    store = open_store(become(Role.LANDER))
    (tmp_path / "landed.yaml").write_text(LANDED)
    source = load_spec(tmp_path / "landed.yaml").sources["web"]
    assert LandingLog("web", source, store, tmp_path / "one").land_batch(0, b"rows", 1)
    assert not LandingLog("web", source, store, tmp_path / "one").land_batch(0, b"rows", 1)
    assert LandingLog("web", source, store, tmp_path / "two", new_generation=True).generation == 2
    refused: list[Callable[[], object]] = [
        lambda: store.get("inbox/web/0000.parquet"),
        lambda: store.delete("inbox/web/0000.parquet"),
        lambda: list(store.list_objects("inbox/web/")),
        lambda: store.put("inbox/other/x", b""),
        lambda: store.put("shop/lease.json", b"{}"),
        lambda: list(store.list_objects("shop/")),
    ]
    for ask in refused:
        with pytest.raises(StoreDeniedError):
            ask()
