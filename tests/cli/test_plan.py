"""`tidegate plan`: what a changed spec would do, by the rules of the driver's start."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Cli, seal

from tidegate.checkpoints.checkpoint_specs import require_compatible_spec, write_spec
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.loader import load_spec

WINDOWS = """\
windows:
  w: {kind: tumbling, size: 1h, aggregates: {n: count(*)}}
"""


def edit(path: Path, old: str, new: str) -> None:
    """Change a text in a file."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture
def sealed(log: SlotLog, spec_file: Path) -> SlotLog:
    """Two epochs of the spec with a window, which is open after the second one."""
    spec_file.write_text(spec_file.read_text() + WINDOWS)
    spec = load_spec(spec_file)
    write_spec(log.store, spec)
    seal(log, spec_digest=spec.digest())
    window = FileRef(key="k", rows=1, bytes=1, sha256="", kind="window:w")
    seal(log, spec_digest=spec.digest(), segments=[window])
    return log


def test_nothing_changes(cli: Cli, sealed: SlotLog, spec_file: Path) -> None:
    """Exit code 0."""
    assert sealed.head().record is not None
    said = cli("plan", str(spec_file))
    assert (said.exit_code, "nothing changes since" in said.out) == (0, True)


def test_changes_are_shown_with_their_reason(cli: Cli, sealed: SlotLog, spec_file: Path) -> None:
    """Exit code 10; the log stays as it is."""
    head = sealed.head()
    edit(spec_file, "lag: 1h", "lag: 2h")
    said = cli("plan", str(spec_file), "--json")
    assert said.exit_code == said.data["exit_code"] == 10
    (row,) = said.data["rows"]
    assert (row["what"], row["verdict"]) == ("sources.EWR.lag", "kept")
    assert "w" in row["tables"]
    assert said.data["goes_on"] == ["windows.w"]
    assert sealed.head() == head


def test_a_window_that_is_open_needs_a_restore(cli: Cli, sealed: SlotLog, spec_file: Path) -> None:
    """Exit code 11: to the newest checkpoint that fits, with the rows that are read again."""
    edit(spec_file, "{n: count(*)}", "{n: count(*), m: count(*)}")
    said = cli("plan", str(spec_file), "--json")
    assert said.exit_code == 11
    (row,) = said.data["rows"]
    assert (row["what"], row["verdict"]) == ("windows.w.aggregates.m added", "restore")
    assert row["way_out"] == "add it as a window with a new name"
    assert said.data["restore"]["rows_again"] == 10
    assert said.data["restore"]["checkpoint"].startswith("t0-000004")
    text = cli("plan", str(spec_file)).out
    assert "reads 10 rows again" in text


def test_the_plan_refuses_what_the_driver_refuses(
    cli: Cli, sealed: SlotLog, spec_file: Path
) -> None:
    """No restore helps: the way out is a new name."""
    edit(spec_file, "size: 1h", "size: 2h")
    said = cli("plan", str(spec_file), "--markdown")
    assert said.exit_code == 11
    assert "| `windows.w.size` | **refused** |" in said.out
    assert "Instead: add it as a window with a new name" in said.out
    newest = sealed.head().record
    assert newest is not None
    with pytest.raises(ConfigurationError, match=r"windows\.w\.size"):
        require_compatible_spec(sealed, load_spec(spec_file), newest)


def test_a_pipeline_without_state_begins(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    """Exit code 10; a store that is not there is a mistake, with exit code 2."""
    (tmp_path / "empty").mkdir()
    said = cli("plan", str(spec_file), "--store", str(tmp_path / "empty"))
    assert (said.exit_code, "nothing is sealed yet" in said.out) == (10, True)
    assert cli("plan", str(spec_file), "--store", str(tmp_path / "nowhere")).exit_code == 2
    assert cli("plan", "no_such_spec.yaml").exit_code == 2


def test_what_only_the_state_knows_depends(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    """Exit code 12: a file does not tell whether a window is open."""
    spec_file.write_text(spec_file.read_text() + WINDOWS)
    new = tmp_path / "new.yaml"
    new.write_text(spec_file.read_text().replace("{n: count(*)}", "{n: count(*), m: count(*)}"))
    said = cli("plan", str(new), "--against", str(spec_file), "--json")
    assert (said.exit_code, said.data["rows"][0]["verdict"]) == (12, "depends")
    assert said.data["rows"][0]["why"].startswith("refused if open windows hold")
    new.write_text(spec_file.read_text() + "description: other\n")
    said = cli("plan", str(new), "--against", str(spec_file))
    assert (said.exit_code, "description" in said.out) == (10, True)
    assert cli("plan", str(spec_file), "--against", str(spec_file)).exit_code == 0
    new.write_text(spec_file.read_text().replace("size: 1h", "size: 2h"))
    assert cli("plan", str(new), "--against", str(spec_file)).exit_code == 11


def test_sinks_begin_and_end(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    """They are not state of the pipeline, and a person wants to know."""
    new = tmp_path / "new.yaml"
    new.write_text(spec_file.read_text() + "sinks: {s: {kind: files, path: out}}\n")
    said = cli("plan", str(new), "--against", str(spec_file), "--json")
    assert [(r["what"], r["verdict"]) for r in said.data["rows"]] == [("sinks.s added", "begins")]
    said = cli("plan", str(spec_file), "--against", str(new), "--json")
    assert [(r["what"], r["verdict"]) for r in said.data["rows"]] == [
        ("sinks.s removed", "dropped")
    ]


def test_jobs_are_compared_with_files(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    """Spark judges their state; the bucket does not keep their specs."""
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("kind: job\nname: j\napp: a.py\n")
    new.write_text("kind: job\nname: j\napp: a.py\nargs: [--fast]\n")
    said = cli("plan", str(new), "--against", str(old), "--json")
    assert (said.exit_code, said.data["rows"][0]["what"]) == (10, "args")
    assert cli("plan", str(new), "--store", str(tmp_path)).exit_code == 2
    assert cli("plan", str(new), "--against", str(spec_file)).exit_code == 2


def test_a_spec_that_was_not_kept_decides_nothing(
    cli: Cli, sealed: SlotLog, spec_file: Path
) -> None:
    """Exit code 12: the driver would go on without comparing."""
    newest = sealed.head().record
    assert newest is not None
    sealed.store.delete(f"flights/specs/{newest.spec_digest}.json")
    edit(spec_file, "lag: 1h", "lag: 2h")
    assert cli("plan", str(spec_file)).exit_code == 12
