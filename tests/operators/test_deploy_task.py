"""The task of `<p>.deploy`, and what the page shows before it, on a local store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.epochs import seal_epoch
from tests.manual_clock import ManualClock
from tests.operators.pages import FakeAirflowQueries, app_of

from tidegate.checkpoints.checkpoint_specs import write_spec
from tidegate.checkpoints.deployed_specs import (
    Deploy,
    confirm_deploy,
    make_copy,
    note_failed_deploy,
    read_deployed,
    write_copy,
)
from tidegate.checkpoints.driver_requests import list_pending_requests
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.pipeline_identity import ProcessIdentity, ensure_identity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.spec.loader import parse_spec
from tidegate.operators import deploy_operator
from tidegate.operators.deploy_operator import DeployOperator

SPEC = """\
apiVersion: tidegate/v1
name: p
sources:
  b: {path: in/b, schema: {t: timestamp, v: double}, event_time: t, lag: 1s}
"""
SLOWER = SPEC.replace("lag: 1s", "lag: 5s")
MOVED = SPEC.replace("path: in/b", "path: in/c")


@pytest.fixture
def file(empty_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a spec that has sealed an epoch and is deployed."""
    spec = parse_spec(SPEC)
    write_spec(empty_store, spec)
    seal_epoch(SlotLog(empty_store, "p"), spec_digest=spec.digest())
    copy = make_copy(spec, {})
    write_copy(empty_store, "p", copy)
    confirm_deploy(empty_store, "p", Deploy(digest=copy.digest, who="driver", at=1))
    found = tmp_path / "specs" / "p.yaml"
    found.parent.mkdir()
    found.write_text(SPEC)
    monkeypatch.setenv("TIDEGATE_PIPELINES", str(found.parent))
    return found


def deploy(file: Path, **params: str) -> str:
    """What the task says, started by ann."""
    given: Any = {"reason": "", "digest": "", **params}
    task = DeployOperator(task_id="deploy", pipeline="p", spec=str(file), **given)
    asker = {"dag_run": SimpleNamespace(triggering_user_name="ann")}
    return str(task.execute(asker)["said"])


def show(store: Store) -> dict[str, Any]:
    """What the page asks before a deploy."""
    with TestClient(app_of(FakeAirflowQueries(["p"], store))) as page:
        answer = page.get("/api/streams/p.stream/deploy")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


class LaterClock(ManualClock):
    """Lets something happen while the task waits."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__()
        self._happens = happens

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._happens()


def test_the_page_shows_the_plan_of_the_file_that_is_deployed(
    empty_store: Store, file: Path
) -> None:
    """Its digest goes along, so that no other file is deployed than the one that was shown."""
    assert show(empty_store)["changes"] == []
    file.write_text(SLOWER)
    found = show(empty_store)
    assert found["changes"] == ['sources.b.lag: "1s" -> "5s"']
    assert (found["refused"], len(found["plan"])) == (False, 1)
    file.write_text(SLOWER.replace("5s", "6s"))
    with pytest.raises(ConfigurationError, match="is not what the plan of p was made of"):
        deploy(file, digest=found["digest"])
    assert read_deployed(empty_store, "p").trying is None
    file.write_text(SLOWER)
    assert "the next one begins with the new spec" in deploy(file, digest=found["digest"])
    trying = read_deployed(empty_store, "p").trying
    assert trying is not None
    assert (trying.digest, trying.who) == (found["digest"], "ann")


def test_what_the_plan_refuses_is_not_deployed_by_the_task(empty_store: Store, file: Path) -> None:
    """The page says so beforehand, and the error has the reason."""
    file.write_text(MOVED)
    assert show(empty_store)["refused"]
    with pytest.raises(ConfigurationError, match="does not fit its state: sources"):
        deploy(file)
    assert read_deployed(empty_store, "p").trying is None


def test_a_file_that_is_deployed_already_changes_nothing(empty_store: Store, file: Path) -> None:
    """Nor does a file of a pipeline that no driver has run."""
    assert deploy(file) == "nothing differs from the deployed spec"
    file.write_text(SPEC.replace("name: p", "name: q"))
    assert deploy(file) == "nothing is deployed yet; the first driver runs the file"
    assert list_pending_requests(empty_store, "p") == []


@pytest.mark.parametrize("end", ["first round", "failure", "none"])
def test_the_task_waits_for_the_first_round_of_a_driver(
    empty_store: Store, file: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The running driver is asked to make room; the task ends as the deploy does."""
    uid = ensure_identity(empty_store, "p")
    lease = Lease.acquire(empty_store, "p", ProcessIdentity.this_process(), uid=uid)
    file.write_text(SLOWER)

    def drive() -> None:
        """The next driver."""
        trying = read_deployed(empty_store, "p").trying
        if trying is None or end == "none":
            return
        if end == "first round":
            confirm_deploy(empty_store, "p", trying)
        else:
            error = ConfigurationError("no such topic", code="kafka.no_topic")
            note_failed_deploy(empty_store, "p", trying.digest, error)

    monkeypatch.setattr(deploy_operator, "SYSTEM_CLOCK", LaterClock(drive))
    if end == "first round":
        assert deploy(file, reason="slow feed") == "deployed"
    else:
        wrong = ConfigurationError if end == "failure" else TransientError
        with pytest.raises(wrong, match="no such topic" if end == "failure" else "no driver has"):
            deploy(file, reason="slow feed")
    lease.release()
    (request,) = list_pending_requests(empty_store, "p")
    assert (request.kind, request.who, request.why) == ("drain", "ann", "deploy: slow feed")
