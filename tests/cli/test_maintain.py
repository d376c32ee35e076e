"""`tidegate storage` and `tidegate gc` on a local store."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Cli

from tidegate.checkpoints.log import SlotLog


def test_storage_counts_by_kind(cli: Cli, log: SlotLog, spec_file: Path) -> None:
    """Slots and tables are counted apart."""
    said = cli("storage", "flights.yaml", "--json")
    assert said.exit_code == 0, said.err
    assert said.data["objects"]["slots"] > 0
    assert said.data["epochs"]["epochs"] == 3
    assert said.data["epochs"]["data_objects"] == 1.0
    assert "wrote 1.0 data objects each" in cli("storage", "flights.yaml").out


def test_a_dry_run_keeps_everything(cli: Cli, log: SlotLog, spec_file: Path) -> None:
    """With checkpoint.retain far above the number of checkpoints nothing would go."""
    said = cli("gc", "flights.yaml", "--dry-run", "--keep-hours", "0", "--json")
    assert said.exit_code == 0, said.err
    assert said.data["dry_run"] is True
    assert said.data["retired"] == []
