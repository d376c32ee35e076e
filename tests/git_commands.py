"""Git for tests, as an author whom no configuration names."""

import subprocess
from pathlib import Path


def run_git(folder: Path, *words: str) -> str:
    """Run git in a folder, and return its output."""
    author = ["-c", "user.name=ann", "-c", "user.email=ann@example.org"]
    command = ["git", "-C", str(folder), *author, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
