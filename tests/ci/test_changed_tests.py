"""Which tests `make check` runs after a change."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.ci.changed_tests import find_test_files, list_changed_files

# Paths of the project are cited whole; those of these tests do not exist.
T, JOBS = "tests", "jobs"
IMPORTERS: dict[str, set[str]] = {
    "tidegate.errors": {"tidegate.jobs.cli.main"},
    "tidegate.jobs.cli": set(),
    "tidegate.jobs.cli.main": set(),
    "tidegate.jobs.spec": {"tidegate.jobs.engine.epoch"},
    "tidegate.jobs.spec.loader": {"tidegate.jobs.engine.epoch"},
    "tidegate.jobs.engine.epoch": {"tidegate.jobs.cli.main"},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A test of each module, one of them by way of two helpers."""
    files = {
        "cli/test_main.py": "from tidegate.jobs.cli import main",
        "spec/test_loader.py": "import tidegate.jobs.spec.loader",
        "spec/cases/test_case.py": "",
        "engine/test_epoch.py": "from tests.engine.rig import Rig",
        "engine/rig.py": "from tests.epochs import Epochs",
        "epochs.py": "from tidegate.jobs.engine.epoch import run_epoch",
        "engine/test_other.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ([], []),
        (["README.md", "pyproject.toml"], []),
        # Its own tests and those of its importer, but not those of that one's importer.
        (["jobs/spec/loader.py"], ["engine/test_epoch", "spec/test_loader"]),
        (["jobs/spec/__init__.py"], ["engine/test_epoch"]),
        (["src/tidegate/errors.py"], ["cli/test_main"]),
        (["jobs/cli/templates/row.txt"], ["cli/test_main"]),  # data of a room
        (["jobs/spec/errors.toml"], ["engine/test_epoch", "spec/test_loader"]),
        ([f"{T}/engine/test_other.py"], ["engine/test_other"]),
        ([f"{T}/epochs.py"], ["engine/test_epoch"]),  # a helper of a helper
        ([f"{T}/spec/conftest.py"], ["spec/cases/test_case", "spec/test_loader"]),
        ([f"{T}/spec/cases/a.json"], ["spec/cases/test_case"]),  # data of tests
        ([f"{T}/engine/test_gone.py", f"{JOBS}/spec/gone.py"], []),  # what was removed
    ],
)
def test_a_change_runs_the_tests_it_concerns(
    root: Path, changed: list[str], tests: list[str]
) -> None:
    """Of what changed, and of what imports it."""
    assert find_test_files(changed, IMPORTERS, root) == [f"tests/{name}.py" for name in tests]


def run_git(folder: Path, *arguments: str) -> None:
    """As a person with a name."""
    person = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *person, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_change_is_what_differs_from_main(tmp_path: Path) -> None:
    """What is committed on the branch, what is not yet, and what git does not know; not main's own."""
    run_git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "old").write_text("1")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "-q", "-m", "one")
    run_git(tmp_path, "switch", "-q", "-c", "branch")
    assert list_changed_files(tmp_path) == []
    (tmp_path / "committed").write_text("1")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "-q", "-m", "two")
    (tmp_path / "old").write_text("2")
    (tmp_path / "unknown").write_text("1")
    assert list_changed_files(tmp_path) == ["committed", "old", "unknown"]
