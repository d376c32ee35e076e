"""The commit of git from which a spec was taken, where it lies in a checkout."""

import os
import re
import subprocess
from pathlib import Path

_OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_LIMIT = 10.0  # seconds; a checkout on a slow disk must not hold up a driver


def find_commit(spec_path: Path) -> str | None:
    """Return the commit of a spec's checkout; None without one, or without git.

    ``with changes`` behind it says that files of the spec's folder differ from the commit, or that
    the spec, or a module of Python beside it, is not in it.
    """
    if pinned := find_pinned_commit(spec_path):
        return pinned[:12]
    folder = spec_path.absolute().parent
    commit = _run_git(folder, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    spec = _run_git(folder, "ls-files", "--error-unmatch", "--", spec_path.name)
    changes = _run_git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    # Other new files may be a store beside the specs, or what Python has compiled.
    modules = _run_git(folder, "ls-files", "--others", "--exclude-standard", "--", ":(glob)*.py")
    is_as_committed = spec and changes == modules == ""
    return commit if is_as_committed else f"{commit}, with changes"


def find_pinned_commit(spec_path: Path) -> str | None:
    """Return the commit of a version of Airflow's git bundle; None elsewhere.

    A run of a DAG keeps the version with which it began. Its folder is `versions/COMMIT`, without
    `.git`.
    """
    for folder in spec_path.absolute().parents:
        if folder.parent.name == "versions" and _COMMIT.fullmatch(folder.name):
            return folder.name
    return None


def is_ancestor(spec_path: Path, before: str, after: str) -> bool:
    """Return whether one commit is known to lie in the history of another one.

    Only for a spec in a version of Airflow's git bundle, which keeps the repository as `bare`
    beside the folder of its versions.
    """
    for folder in spec_path.absolute().parents:
        if folder.name == "versions":
            words = ("merge-base", "--is-ancestor", before, after)
            return _run_git(folder.parent / "bare", *words) is not None
    return False


def _run_git(folder: Path, *words: str) -> str | None:
    # The hook of a repository names it in variables, which count more than the folder.
    environment = {name: value for name, value in os.environ.items() if name not in _OF_HOOKS}
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
