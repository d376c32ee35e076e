"""The commit of git from which a spec was taken, where it lies in a checkout."""

import subprocess
from pathlib import Path

_LIMIT = 10.0  # seconds; a checkout on a slow disk must not hold up a driver


def find_commit(spec_path: Path) -> str | None:
    """Return the commit of a spec's checkout; None without one, or without git.

    ``with changes`` behind it says that files of the spec's folder differ from the commit.
    """
    folder = spec_path.absolute().parent
    commit = _run_git(folder, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    changes = _run_git(folder, "status", "--porcelain", "--", ".")
    return f"{commit}, with changes" if changes else commit


def _run_git(folder: Path, *words: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=_LIMIT
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
