"""New code under an old stream, and the way back.

Real drivers of two wheels, one after the other on one log.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.e2e.drivers import Steady
from tidegate import __version__
from tidegate.jobs.engine.recorded_epochs import read_kept_manifests

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).resolve().parents[2]
NEXT = f"{__version__}+next"


def test_upgraded_and_taken_back(tmp_path: Path) -> None:
    """Each driver goes on after the other's checkpoint.

    Every checkpoint says which code made it; the tables are exact.
    """
    old = _wheel(tmp_path)
    new = _as_version(old, tmp_path / "next.whl")
    steady = Steady(tmp_path / "p", 9)
    for code, epochs in ((old, 3), (new, 3), (old, None)):
        limit = () if epochs is None else ("--epochs", str(epochs))
        assert steady.run("", *limit, environment={"PYTHONPATH": str(code)}) == 0, steady.log_text()
    versions = [epoch.code_version for epoch in read_kept_manifests(steady.log())]
    assert versions[:6] == [__version__] * 3 + [NEXT] * 3
    assert set(versions[6:]) == {__version__}
    assert steady.exact().problems == []


def _wheel(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(REPOSITORY),
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
