"""`tidegate deploy`: what differs, the plan, and how the deploy ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, seal

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
from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.loader import load_spec


@pytest.fixture
def deployed(log: SlotLog, spec_file: Path) -> SlotLog:
    """The spec has sealed an epoch and is deployed."""
    spec = load_spec(spec_file)
    write_spec(log.store, spec)
    seal(log, spec_digest=spec.digest())
    copy = make_copy(spec, {})
    write_copy(log.store, "flights", copy)
    confirm_deploy(log.store, "flights", Deploy(digest=copy.digest, who="driver", at=1))
    return log


def edit(path: Path, old: str, new: str) -> None:
    """Change a text in a file."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_without_a_driver_the_next_one_begins_with_it(
    cli: Cli, deployed: SlotLog, spec_file: Path
) -> None:
    """What differs is shown as fields, then the plan; a person answers before anything is done."""
    assert "nothing differs" in cli("deploy", str(spec_file)).out
    edit(spec_file, "lag: 1h", "lag: 2h")
    assert cli("deploy", str(spec_file), input="n\n").exit_code == 1
    assert read_deployed(deployed.store, "flights").trying is None
    said = cli("deploy", str(spec_file), "--yes", "--why", "slow feed")
    assert said.exit_code == 0
    assert 'sources.EWR.lag: "1h" -> "2h"' in said.out
    assert "the next one begins with the new spec" in said.out
    trying = read_deployed(deployed.store, "flights").trying
    assert trying is not None
    assert trying.why == "slow feed"


def test_what_the_plan_refuses_is_not_deployed(
    cli: Cli, deployed: SlotLog, spec_file: Path
) -> None:
    """Exit code 11, as that of the plan."""
    edit(spec_file, "path: inbox/EWR", "path: inbox/JFK")
    assert cli("deploy", str(spec_file), "--yes").exit_code == 11
    assert read_deployed(deployed.store, "flights").trying is None


def test_before_the_first_driver_the_file_counts(cli: Cli, log: SlotLog, spec_file: Path) -> None:
    """There is nothing to compare with."""
    assert log.head().record is not None
    said = cli("deploy", str(spec_file), "--yes")
    assert (said.exit_code, "nothing is deployed yet" in said.out) == (0, True)


def test_a_running_driver_is_asked_to_make_room(
    cli: Cli, deployed: SlotLog, spec_file: Path
) -> None:
    """By a request that does not stop the pipeline; exit code 3 while no driver has begun with the new spec."""
    uid = ensure_identity(deployed.store, "flights")
    lease = Lease.acquire(deployed.store, "flights", ProcessIdentity.this_process(), uid=uid)
    edit(spec_file, "lag: 1h", "lag: 2h")
    said = cli("deploy", str(spec_file), "--yes", "--wait", "0")
    lease.release()
    assert (said.exit_code, "the next driver begins with the new spec" in said.err) == (3, True)
    (request,) = list_pending_requests(deployed.store, "flights")
    assert (request.kind, request.token) == ("drain", lease.token)
    assert request.id.startswith("hold-deploy-")


def test_a_plan_holds_for_one_spec_and_its_verdicts(
    cli: Cli, deployed: SlotLog, spec_file: Path, tmp_path: Path
) -> None:
    """Another edit, other verdicts or a damaged file refuse; an epoch more does not."""
    plan, sealed_by = tmp_path / "plan.json", load_spec(spec_file).digest()
    edit(spec_file, "lag: 1h", "lag: 2h")
    assert cli("plan", str(spec_file), "--out", str(plan)).exit_code == 10
    deploy = ("deploy", str(spec_file), "--yes", "--plan", str(plan))
    written = json.loads(plan.read_text())
    edit(spec_file, "lag: 2h", "lag: 3h")
    assert "the spec or its code has changed" in cli(*deploy).err
    edit(spec_file, "lag: 3h", "lag: 2h")
    plan.write_text(json.dumps(written | {"plan": written["plan"] | {"timeline": "t7"}}))
    assert "the state has changed" in cli(*deploy).err
    plan.write_text("no plan")
    assert cli(*deploy).exit_code == 2
    plan.write_text(json.dumps(written))
    assert read_deployed(deployed.store, "flights").trying is None
    seal(deployed, spec_digest=sealed_by)
    assert cli(*deploy).exit_code == 0
    assert read_deployed(deployed.store, "flights").trying is not None


def test_status_says_what_waits(cli: Cli, deployed: SlotLog, spec_file: Path) -> None:
    """By fields: while the file waits, while its deploy waits, and after it has failed."""
    assert cli("status", str(spec_file), "--json").data["warnings"] == []
    edit(spec_file, "lag: 1h", "lag: 2h")
    assert cli("status", str(spec_file), "--json").data["warnings"] == [
        'the file waits for tidegate deploy; it differs in sources.EWR.lag: "1h" -> "2h"'
    ]
    cli("deploy", str(spec_file), "--yes")
    (waits,) = cli("status", str(spec_file), "--json").data["warnings"]
    assert "waits for the first round" in waits
    trying = read_deployed(deployed.store, "flights").trying
    assert trying is not None
    error = ConfigurationError("the topic is not there", code="kafka.no_topic")
    note_failed_deploy(deployed.store, "flights", trying.digest, error)
    said = cli("status", str(spec_file)).out
    assert "drivers run the spec before: the topic is not there" in said
    assert "it differs in sources.EWR.lag" in said
