from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.cli.conftest import Cli, ids, seal

from tidegate.checkpoints import restore
from tidegate.checkpoints.batch_notes import SinkPlan, SinkRewind
from tidegate.checkpoints.checkpoint_specs import write_spec
from tidegate.checkpoints.driver_requests import DesiredState, read_desired_state, set_desired_state
from tidegate.checkpoints.host_clock import Clock
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.cli import checkpoint_commands
from tidegate.jobs.sealed_queries.state_diff import OperatorDifference, StateExample
from tidegate.jobs.spec.loader import load_spec


def test_list_is_newest_first_and_limited(cli: Cli, log: SlotLog) -> None:
    """The newest checkpoints come first; what is left out is said."""
    assert ids(cli("checkpoints", "list", "flights", "--json").data) == [3, 2, 1]
    said = cli("checkpoints", "list", "flights", "--limit", "1")
    assert "2 older ones" in said.out
    assert str(log.head().checkpoint) in said.out


def test_show_takes_a_prefix(cli: Cli, log: SlotLog) -> None:
    """The beginning of an id is enough; the manifest comes whole with --json."""
    assert (
        cli("checkpoints", "show", "flights", "t0-000002", "--json").data["counters"]["read"] == 20
    )
    said = cli("checkpoints", "show", "flights", "latest")
    assert "rows since the beginning" in said.out
    assert "EWR/0" in said.out


def test_verify_finds_a_lost_file(cli: Cli, log: SlotLog) -> None:
    """Whole is 0; a missing file is named, is exit 1, and can be condemned so that no one restores
    it.
    """
    assert cli("checkpoints", "verify", "flights", "--all").exit_code == 0
    lost = log.head().record
    assert lost is not None
    log.store.delete(lost.files["events"][0].key)
    said = cli("checkpoints", "verify", "flights", "--condemn", "--json")
    assert said.exit_code == 1
    assert said.data[0]["findings"][0]["problem"] == "missing"
    assert cli("checkpoints", "pin", "flights", "latest", "keep").exit_code == 2


def test_restore_asks_and_tells_what_it_costs(cli: Cli, log: SlotLog) -> None:
    """Without a yes nothing happens; with it the log goes on from the older checkpoint."""
    set_desired_state(log.store, "flights", DesiredState.RUN, who="ann", why="nightly")
    said = cli("checkpoints", "restore", "flights", "t0-000001", input="n\n")
    assert (said.exit_code, "2 epochs are taken back" in said.out) == (1, True)
    assert log.head().timeline == 0
    assert (
        cli("checkpoints", "restore", "flights", "t0-000001", "--yes", "--why", "bad day").exit_code
        == 0
    )
    head, (fork,) = SlotLog(log.store, "flights").head(), log.list_forks()
    assert (head.timeline, head.slot, fork.why) == (1, 1, "bad day")
    wish = read_desired_state(log.store, "flights")
    assert (wish.state, wish.who) == (DesiredState.RUN, "ann")


def test_dry_run_changes_nothing(cli: Cli, log: SlotLog) -> None:
    """A plan is only a plan."""
    said = cli("checkpoints", "restore", "flights", "t0-000002", "--dry-run", "--json")
    assert (said.data["done"], said.data["epochs_rewound"], said.data["tables"]) == (
        False,
        1,
        {"events": 9},
    )
    assert log.head().timeline == 0


def test_a_plan_names_what_happens_to_each_kind_of_sink(
    cli: Cli, log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of Iceberg and Delta too, which are rolled back."""
    sinks = tuple(
        SinkPlan(query=f"q{rewind}", newest=3, batch=None, sink="s", rewind=rewind)
        for rewind in SinkRewind
    )
    plan = restore.plan_restore(log, log.head().checkpoint).model_copy(update={"sinks": sinks})
    monkeypatch.setattr(restore, "plan_restore", lambda *_, **__: plan)
    said = cli("checkpoints", "restore", "flights", "latest", "--dry-run")
    assert said.exit_code == 0
    assert all(f"q{rewind}" in said.out for rewind in SinkRewind)
    assert "one commit" in said.out


def test_restore_under_a_live_driver_is_refused(
    cli: Cli, log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone who renews the lease keeps it; the message says how to stop the stream."""
    lease = Lease.acquire(log.store, "flights", ProcessIdentity.this_process())
    # The observer's pause is when the holder renews; no one really waits.
    monkeypatch.setattr(Clock, "sleep", lambda self, seconds: lease.renew())
    said = cli("checkpoints", "restore", "flights", "t0-000001", "--yes")
    assert (said.exit_code, "tidegate stop flights" in said.err) == (4, True)
    assert log.head().timeline == 0


def test_a_stopped_pipeline_stays_stopped_through_a_restore_until_it_is_started(
    cli: Cli, log: SlotLog
) -> None:
    """No one drives it; `start` says that it may run again."""
    assert "stays stopped" in cli("stop", "flights", "--why", "upgrade").out
    assert cli("checkpoints", "restore", "flights", "t0-000001", "--yes").exit_code == 0
    assert (
        read_desired_state(log.store, "flights").state,
        read_desired_state(log.store, "flights").why,
    ) == (DesiredState.STOPPED, "upgrade")
    said = cli("start", "flights").out
    assert "standby driver or Airflow takes over; to run it here: tidegate run flights" in said
    assert read_desired_state(log.store, "flights").state is DesiredState.RUN


def test_a_restore_alone_keeps_no_driver_away(cli: Cli, log: SlotLog) -> None:
    """Where no person has said whether the pipeline should run, a person who starts a driver afterwards
    has one.
    """
    assert cli("checkpoints", "restore", "flights", "t0-000001", "--yes").exit_code == 0
    assert not read_desired_state(log.store, "flights").keeps_drivers_away


def test_no_pipeline_starts_in_the_middle_of_a_restore(cli: Cli, log: SlotLog) -> None:
    """As long as the one who restores lives; what a dead one left behind may be started."""
    set_desired_state(log.store, "flights", DesiredState.RECOVERING, who="ann")
    lease = Lease.acquire(log.store, "flights", ProcessIdentity.this_process())
    said = cli("start", "flights")
    assert (said.exit_code, "ann restores flights" in said.err) == (2, True)
    lease.release()
    assert cli("start", "flights").exit_code == 0
    assert read_desired_state(log.store, "flights").state is DesiredState.RUN


def test_latest_healthy_passes_over_what_the_checks_condemned(cli: Cli, log: SlotLog) -> None:
    """The newest checkpoint that a quality run found well, not the newest."""
    ill = {"check": "late_ratio", "epochs": [3, 3]}
    runs = [
        {"id": str(number), "checkpoint": str(f.epoch.id), "recent_since": number, "critical": ills}
        for number, (f, ills) in enumerate(
            zip(log.epochs_between(0, 1, 3), ([], [], [ill]), strict=True)
        )
    ]
    log.store.put(
        "flights/quality/history.json",
        json.dumps({"format_version": 1, "runs": runs[::-1]}).encode(),
    )
    assert cli("checkpoints", "show", "flights", "latest_healthy", "--json").data["slot"] == 2


def test_pins_name_checkpoints(cli: Cli, log: SlotLog) -> None:
    """A pin can be used wherever a checkpoint is asked for, and shows in the list, until it is
    given up.
    """
    assert cli("checkpoints", "pin", "flights", "t0-000002", "before_upgrade").exit_code == 0
    assert cli("checkpoints", "show", "flights", "before_upgrade", "--json").data["slot"] == 2
    assert cli("checkpoints", "list", "flights", "--json").data[1]["pins"] == ["before_upgrade"]
    assert cli("checkpoints", "unpin", "flights", "before_upgrade").exit_code == 0
    said = cli("checkpoints", "unpin", "flights", "before_upgrade")
    assert (said.exit_code, "no pin" in said.err) == (2, True)


def test_diff_counts_the_difference(cli: Cli, log: SlotLog) -> None:
    """The diff subtracts rows, shows positions side by side, and calls equal checkpoints equal."""
    seal(log)
    data = cli("checkpoints", "diff", "flights", "t0-000001", "latest", "--json").data
    assert (data["counters"]["read"], data["positions"]["EWR/0"]) == (30, {"left": 1, "right": 4})
    assert "+30" in cli("checkpoints", "diff", "flights", "t0-000001", "latest").out
    assert "are equal" in cli("checkpoints", "diff", "flights", "latest", "latest").out
    plain, raw = (cli("checkpoints", "diff", "flights", "1", "3", *o).out for o in ((), ("--raw",)))
    assert ("decider" in plain, "t0-000003" in plain, "+20" in raw) == (False, True, True)


def test_diff_shows_rows_of_state_on_request(
    cli: Cli, log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bounded number of keys; a pipeline has no state of Spark."""
    said = cli("checkpoints", "diff", "flights", "1", "latest", "--state")
    assert (said.exit_code, "is a pipeline" in said.err) == (2, True)
    key = StateExample(change="changed", key="k" * 99, left="1¦x", right="a\u2028b")
    found = OperatorDifference(
        query="q",
        operator="0 symmetricHashJoin",
        part="left",
        added=1,
        removed=0,
        changed=1,
        examples=(key,),
    )
    asked = Mock(return_value=[found])
    monkeypatch.setattr(checkpoint_commands, "_compare_states", asked)
    arguments = ("checkpoints", "diff", "flights", "1", "latest", "--state", "--examples", "1")
    said = cli(*arguments)
    assert asked.call_args.args[3] == 1
    assert "q: 0 symmetricHashJoin left" in said.out
    assert "kkk..." in said.out.replace("\n", "")
    assert "1|x" in said.out
    assert "a b" in said.out
    assert cli(*arguments, "--json").data["state_rows"] == [found.model_dump(mode="json")]
    asked.return_value = []
    assert "no query has state whose objects differ" in cli(*arguments).out


def test_everything_shows_restores(cli: Cli, log: SlotLog) -> None:
    """After a restore the left epochs are listed as such, with the restore itself."""
    restored = cli("checkpoints", "restore", "flights", "t0-000001", "--yes")
    assert "what it left: tidegate checkpoints list flights --all" in restored.out
    assert ids(cli("checkpoints", "list", "flights", "--json").data) == [1]
    said = cli("checkpoints", "list", "flights", "--all")
    assert "left by a restore" in said.out
    assert "restore of t0-000001" in said.out


def test_a_changed_spec_is_judged_before_anything_is_restored(
    cli: Cli, log: SlotLog, spec_file: Path
) -> None:
    """What is kept is printed first.

    What would be misread is refused, and the log stays as it is.
    """
    old = load_spec(spec_file)
    write_spec(log.store, old)
    sealed = seal(log, spec_digest=old.digest())
    seal(log)
    spec_file.write_text(spec_file.read_text().replace("lag: 1h", "lag: 2h"))
    said = cli("checkpoints", "restore", str(spec_file), str(sealed.id), "--dry-run", "--json")
    assert [(c["what"], c["verdict"]) for c in said.data["spec_changes"]] == [
        ("sources.EWR.lag", "kept")
    ]
    assert (
        "sources.EWR.lag"
        in cli("checkpoints", "restore", str(spec_file), str(sealed.id), "--dry-run").out
    )
    spec_file.write_text(spec_file.read_text().replace("inbox/EWR", "inbox/elsewhere"))
    head = log.head()
    said = cli("checkpoints", "restore", str(spec_file), str(sealed.id), "--yes")
    assert said.exit_code == 2
    assert "give the source a new name" in said.err
    assert log.head() == head


def test_the_beginning_can_be_restored(cli: Cli, log: SlotLog) -> None:
    """Before the first checkpoint: every row is read again."""
    said = cli("checkpoints", "restore", "flights", "beginning", "--yes")
    assert "back to beginning" in said.out
    assert (log.head().timeline, log.head().slot) == (1, 0)


def test_a_deep_verification_opens_the_files(cli: Cli, log: SlotLog) -> None:
    """Bytes that fit their checksum, but are no rows."""
    assert cli("checkpoints", "verify", "flights").exit_code == 0
    said = cli("checkpoints", "verify", "flights", "--deep")
    assert said.exit_code == 1
    assert "not a readable Parquet file" in said.out
    assert "1/3" in cli("checkpoints", "verify", "flights", "--all").out
