"""`tidegate storage` and `tidegate gc` on a local store."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Cli

from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TransientError
from tidegate.jobs.driver import housekeeping
from tidegate.jobs.sinks.table_maintenance import CompactionResult


def test_storage_counts_by_kind(cli: Cli, log: SlotLog, spec_file: Path) -> None:
    """Slots and tables are counted apart."""
    said = cli("storage", "flights.yaml", "--json")
    assert said.exit_code == 0, said.err
    # Every object has a kind that says what it is.
    assert set(said.data["objects"]) == {"control documents", "slots", "tables"}
    assert said.data["epochs"]["epochs"] == 3
    assert said.data["epochs"]["data_objects"] == 1.0
    assert "wrote 1.0 data objects each" in cli("storage", "flights.yaml").out


def test_a_dry_run_keeps_everything(cli: Cli, log: SlotLog, spec_file: Path) -> None:
    """With checkpoint.retain far above the number of checkpoints nothing would go."""
    said = cli("gc", "flights.yaml", "--dry-run", "--keep-hours", "0", "--json")
    assert said.exit_code == 0, said.err
    assert said.data["dry_run"] is True
    assert said.data["retired"] == []


def test_gc_says_how_many_files_became_how_many(
    cli: Cli, log: SlotLog, spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compaction is part of it, in words and as JSON; why it was left is said as well."""
    found = {
        "events": CompactionResult(1200, 3),
        "late": CompactionResult(0, 0, "another engine deleted single rows of it"),
    }
    monkeypatch.setattr(housekeeping, "compact_tables", lambda *_: found)
    said = cli("gc", "flights.yaml").out
    assert "events: 1,200 data files became 3" in said
    assert "late is not compacted: another engine deleted single rows of it" in said
    assert cli("gc", "flights.yaml", "--json").data["compacted"]["events"] == {
        "before": 1200,
        "after": 3,
        "skipped": "",
    }

    def away(*_: object) -> dict[str, CompactionResult]:
        raise TransientError("the catalog is away", code="compaction.unavailable")

    monkeypatch.setattr(housekeeping, "compact_tables", away)
    assert "tables are not compacted: the catalog is away" in cli("gc", "flights.yaml").out
