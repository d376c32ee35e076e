"""`tidegate backup`: the copy is verified, and damage ends with exit code 1."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Cli, seal

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.slot_log import SlotLog


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
