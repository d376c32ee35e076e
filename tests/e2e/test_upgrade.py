"""New code under an old stream, and the way back.

Real drivers of two wheels, one after the other on one log: today's code under two version numbers,
and today's code beside that of an earlier commit.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.e2e.drivers import Steady
from tidegate import __version__
from tidegate.jobs.engine.recorded_epochs import read_kept_manifests

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).resolve().parents[2]
# Its code is taken from the history of the repository.
EARLIER = "e3dab941"
NEXT = f"{__version__}+next"


# In CI, the test below goes on under other code, and back.
@pytest.mark.long
def test_upgraded_and_taken_back(tmp_path: Path) -> None:
    """Each driver goes on after the other's checkpoint.

    Every checkpoint says which code made it; the tables are exact.
    """
    old = _build_wheel(REPOSITORY, tmp_path)
    new = _as_version(old, tmp_path / "next.whl")
    steady = Steady(tmp_path / "p", 9)
    for code, epochs in ((old, 3), (new, 3), (old, None)):
        limit = () if epochs is None else ("--epochs", str(epochs))
        assert steady.run("", *limit, environment={"PYTHONPATH": str(code)}) == 0, steady.log_text()
    versions = [epoch.code_version for epoch in read_kept_manifests(steady.log())]
    assert versions[:6] == [__version__] * 3 + [NEXT] * 3
    assert set(versions[6:]) == {__version__}
    assert steady.exact().problems == []


def test_an_earlier_commit_s_driver_and_today_s_take_turns(tmp_path: Path) -> None:
    """The log that old code wrote goes on under today's, and back; the tables stay exact."""
    old = _build_wheel(_export_commit(EARLIER, tmp_path / "earlier"), tmp_path / "old")
    new = _build_wheel(REPOSITORY, tmp_path / "new")
    steady = Steady(tmp_path / "p", 9)
    for code, epochs in ((old, 3), (new, 3), (old, 1), (new, None)):
        limit = () if epochs is None else ("--epochs", str(epochs))
        assert steady.run("", *limit, environment={"PYTHONPATH": str(code)}) == 0, steady.log_text()
    assert len(list(read_kept_manifests(steady.log()))) >= 9
    assert steady.exact().problems == []


def _export_commit(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a new folder."""
    archive = folder.with_suffix(".tar")
    git = ["git", "-C", str(REPOSITORY), "archive", "--format=tar", f"--output={archive}", commit]
    subprocess.run(git, check=True)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="fully_trusted")  # links to its own folders are among them
    return folder


def _build_wheel(checkout: Path, folder: Path) -> Path:
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
    subprocess.run(command, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


def _as_version(wheel: Path, copy: Path) -> Path:
    """The same code under the next version's number."""
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(copy, "w") as after:
        for name in before.namelist():
            data = before.read(name)
            after.writestr(
                name,
                (
                    data.replace(__version__.encode(), NEXT.encode())
                    if name == "tidegate/__init__.py"
                    else data
                ),
            )
    return copy
