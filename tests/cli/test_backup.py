"""`tidegate backup` and `tidegate move`: a copy is verified, and damage ends with exit code 1."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import SPEC, Cli, seal

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import refuse_copied_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError


def test_a_backup_says_what_it_copied_and_that_it_is_whole(
    cli: Cli, log: SlotLog, tmp_path: Path
) -> None:
    """A second run copies what is new; a file that was damaged in the copy is named."""
    said = cli("backup", "flights", "--to", str(tmp_path / "copy"))
    assert (said.exit_code, "3 of 3 checkpoints of the copy are whole" in said.out) == (0, True)
    seal(log)
    assert "4 of 4 checkpoints" in cli("backup", "flights", "--to", str(tmp_path / "copy")).out
    copy = LocalStore(tmp_path / "copy")
    assert SlotLog(copy, "flights").head().checkpoint == log.head().checkpoint
    damaged = next(one for one in copy.list_objects("flights/") if one.key.endswith(".parquet"))
    copy.put(damaged.key, b"x" * damaged.size)
    said = cli("backup", "flights", "--to", str(tmp_path / "copy"))
    assert (said.exit_code, f"checksum: {damaged.key}" in said.out) == (1, True)
    assert cli("backup", "flights", "--to", str(log.store.url)).exit_code == 2


def test_a_move_counts_only_if_the_copy_is_whole(cli: Cli, log: SlotLog, tmp_path: Path) -> None:
    """A damaged checkpoint leaves the pipeline where it is."""
    spec, target = tmp_path / "flights.yaml", str(tmp_path / "new")
    spec.write_text(SPEC)
    address = str(log.store.url)
    damaged = next(
        one for one in log.store.list_objects("flights/") if one.key.endswith(".parquet")
    )
    whole = log.store.get(damaged.key).data
    log.store.put(damaged.key, b"x" * damaged.size)
    said = cli("move", str(spec), target, "--store", address)
    assert (said.exit_code, f"checksum: {damaged.key}" in said.out) == (1, True)
    refuse_copied_store(log.store, "flights")
    log.store.put(damaged.key, whole)
    LocalStore(tmp_path / "new").delete(damaged.key)
    said = cli("move", str(spec), target, "--store", address)
    assert (said.exit_code, " now: give its drivers" in " ".join(said.out.split())) == (0, True)
    refuse_copied_store(LocalStore(tmp_path / "new"), "flights")
    with pytest.raises(ConfigurationError, match="is a copy of"):
        refuse_copied_store(log.store, "flights")
