"""Wheels of today's code and of an earlier commit."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.named_tests import ROOT

# Its code is taken from the history of the repository.
EARLIER = "e3dab941e458"
EARLIER_SHA256 = "000d0000015587c00eee96bd2c8a19c2b9c2e47103a1b7a344ee231a4a74b0ea"
"""Of the wheel of the earlier commit, by the hatchling of `requirements.lock`."""


def export_commit(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a new folder."""
    git = ["git", "-C", str(ROOT)]
    known = subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"])
    assert known.returncode == 0, f"this clone lacks {commit}: git fetch --unshallow"
    archive = folder.with_suffix(".tar")
    command = [*git, "archive", "--format=tar", f"--output={archive}", commit]
    subprocess.run(command, check=True)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="fully_trusted")  # links to its own folders are among them
    return folder


def build_earlier_wheel(folder: Path) -> Path:
    """Build the wheel of the earlier commit below a folder."""
    wheel = build_wheel(export_commit(EARLIER, folder / "earlier"), folder / "earlier-wheel")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert found == EARLIER_SHA256, f"the wheel of {EARLIER} has another hash: {found}"
    return wheel


def build_wheel(checkout: Path, folder: Path) -> Path:
    """Build the wheel of a project into a folder, with the same bytes each time."""
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(checkout),
    ]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1580601600"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    (found,) = folder.glob("*.whl")
    return found


def build_wheels(checkout: Path, folder: Path) -> list[str]:
    """Build today's wheels, of the kernel and of the rest, into a folder."""
    found = []
    for project in (checkout / "infra" / "kernel", checkout):
        wheel = build_wheel(project, folder / f"of-{project.name}")
        found.append(str(wheel.rename(folder / wheel.name)))
    return found
