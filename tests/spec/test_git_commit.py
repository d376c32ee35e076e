"""The commit of a spec is that of its checkout, as long as the folder is as committed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.git_commands import run_git

from tidegate.jobs.spec.git_commit import find_commit, find_pinned_commit


def test_the_commit_of_a_checkout_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another folder of the repository may differ; a file beside the spec is its code."""
    specs = tmp_path / "specs"
    specs.mkdir()
    spec = specs / "orders.yaml"
    spec.write_text("name: orders")
    run_git(tmp_path, "init", "--quiet")
    assert find_commit(spec) is None
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "--quiet", "-m", "first")
    commit = run_git(tmp_path, "rev-parse", "--short=12", "HEAD")
    (tmp_path / "README.md").write_text("new")
    (specs / ".tidegate").mkdir()
    (specs / ".tidegate" / "lease.json").write_text("{}")
    assert find_commit(spec) == commit
    run_git(tmp_path, "init", "--quiet", "other")
    with monkeypatch.context() as patch:  # as in the hook of another repository
        patch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
        assert find_commit(spec) == commit
    (specs / "new.yaml").write_text("name: new")
    assert find_commit(specs / "new.yaml") == f"{commit}, with changes"
    (specs / "reducers.py").write_text("x = 1")
    assert find_commit(spec) == f"{commit}, with changes"


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver starts there all the same."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_commit(tmp_path / "orders.yaml") is None


def test_a_version_of_a_git_bundle_names_its_commit(tmp_path: Path) -> None:
    """Airflow has taken `.git` away there."""
    commit = "0123456789abcdef" * 2 + "01234567"
    for subfolder in ("dags/pipelines", "pipelines"):
        spec = tmp_path / "team/versions" / commit / subfolder / "orders.yaml"
        assert (find_pinned_commit(spec), find_commit(spec)) == (commit, commit[:12])
    assert find_pinned_commit(tmp_path / "versions/2026/orders.yaml") is None
