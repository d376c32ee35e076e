"""`tidegate backup` and `tidegate move`: a copy is verified, and damage ends with exit code 1."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import SPEC, Cli, seal

from tidegate.checkpoints import verify
from tidegate.checkpoints.backup import copy_pipeline
from tidegate.checkpoints.driver_requests import (
    DesiredState,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import move_identity, refuse_copied_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError


def test_a_backup_says_what_it_copied_and_that_it_is_whole(
    cli: Cli, log: SlotLog, tmp_path: Path
) -> None:
    """A second run copies what is new; a file that was damaged in the copy is named."""
    said = cli("backup", "flights", str(tmp_path / "copy"))
    assert (said.exit_code, "3 of 3 checkpoints of the copy are whole" in said.out) == (0, True)
    seal(log)
    assert "4 of 4 checkpoints" in cli("backup", "flights", str(tmp_path / "copy")).out
    copy = LocalStore(tmp_path / "copy")
    assert SlotLog(copy, "flights").head().checkpoint == log.head().checkpoint
    damaged = next(one for one in copy.list_objects("flights/") if one.key.endswith(".parquet"))
    copy.put(damaged.key, b"x" * damaged.size)
    said = cli("backup", "flights", str(tmp_path / "copy"))
    assert (said.exit_code, f"checksum: {damaged.key}" in said.out) == (1, True)
    assert cli("backup", "flights", str(log.store.url)).exit_code == 2


def test_a_move_counts_only_if_the_copy_is_whole(
    cli: Cli, log: SlotLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage of the copy, or a file that cannot be read, leaves the pipeline where it is."""
    spec, copy = tmp_path / "flights.yaml", LocalStore(tmp_path / "new")
    spec.write_text(SPEC)
    move = ("move", str(spec), str(tmp_path / "new"), "--store", str(log.store.url))
    damaged = next(
        one for one in log.store.list_objects("flights/") if one.key.endswith(".parquet")
    )
    with monkeypatch.context() as patch:
        patch.setattr(verify, "sha256_of_file", _refuse)
        said = cli(*move)
    assert (said.exit_code, "unknown: denied" in " ".join(said.err.split())) == (1, True)
    refuse_copied_store(log.store, "flights")
    copy.put(damaged.key, b"x" * damaged.size)
    said = cli(*move)
    assert (said.exit_code, f"checksum: {damaged.key}" in said.out) == (1, True)
    refuse_copied_store(log.store, "flights")
    copy.delete(damaged.key)
    said = cli(*move)
    assert (said.exit_code, " now: give its drivers" in " ".join(said.out.split())) == (0, True)
    refuse_copied_store(copy, "flights")
    with pytest.raises(ConfigurationError, match="is a copy of"):
        refuse_copied_store(log.store, "flights")


@pytest.mark.parametrize("command", [("start",), ("checkpoints", "restore", "--yes")])
def test_a_moved_pipeline_is_neither_started_nor_restored_at_its_old_address(
    cli: Cli, log: SlotLog, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """It stays stopped there, so that Airflow starts no driver."""
    target = LocalStore(tmp_path / "new")
    copy_pipeline(log.store, target, "flights")
    move_identity(log.store, target, "flights")
    set_desired_state(log.store, "flights", DesiredState.STOPPED, who="move")
    checkpoint = ("1",) if "restore" in command else ()
    said = cli(*command, "flights", *checkpoint)
    assert (said.exit_code, "is a copy of" in " ".join(said.err.split())) == (2, True)
    desired = read_desired_state(log.store, "flights")
    assert (desired.state, desired.who) == (DesiredState.STOPPED, "move")
    assert log.head().slot == 3


def test_damage_of_the_origin_moves_along(cli: Cli, log: SlotLog, tmp_path: Path) -> None:
    """It would else keep the pipeline where it is for as long as the checkpoint is kept."""
    spec = tmp_path / "flights.yaml"
    spec.write_text(SPEC)
    first, second, *_ = (
        one for one in log.store.list_objects("flights/") if one.key.endswith(".parquet")
    )
    log.store.put(first.key, b"x" * first.size)
    log.store.delete(second.key)
    said = cli("move", str(spec), str(tmp_path / "new"), "--store", str(log.store.url))
    assert (said.exit_code, f"missing: {second.key}" in said.out) == (0, True)
    assert "the origin has the same damage" in said.out
    refuse_copied_store(LocalStore(tmp_path / "new"), "flights")


def _refuse(_: Path) -> str:
    raise PermissionError("denied")
