"""New code under an old stream, and the way back.

Real drivers of two wheels, one after the other on one log: today's code under two version numbers,
and today's code beside that of an earlier commit, on a bucket that its wheel wrote
(`earlier_bucket.py`).
"""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.e2e.drivers import Piped, Steady
from tests.e2e.earlier_bucket import OBJECTS, ROWS, open_bucket
from tests.named_tests import ROOT
from tests.servers.minio import RealMinio
from tests.wheels import build_earlier_wheel, build_wheels
from tidegate import __version__
from tidegate.jobs.cli.main import app
from tidegate.jobs.engine.recorded_epochs import read_kept_manifests

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

NEXT = f"{__version__}+next"
OLD = f"{__version__}+earlier"


# In CI, the next test goes on under other code, and back.
@pytest.mark.long
def test_upgraded_and_taken_back(tmp_path: Path) -> None:
    """Each driver goes on after the other's checkpoint.

    Every checkpoint says which code made it; the tables are exact.
    """
    wheels = build_wheels(ROOT, tmp_path)
    later = [_as_version(Path(old), tmp_path / f"next-{Path(old).name}", NEXT) for old in wheels]
    old, new = os.pathsep.join(wheels), os.pathsep.join(map(str, later))
    steady = Steady(tmp_path / "p", 9)
    for code, epochs in ((old, 3), (new, 3), (old, None)):
        limit = () if epochs is None else ("--epochs", str(epochs))
        assert steady.run("", *limit, environment={"PYTHONPATH": str(code)}) == 0, steady.log_text()
    versions = [epoch.code_version for epoch in read_kept_manifests(steady.log())]
    assert versions[:6] == [__version__] * 3 + [NEXT] * 3
    assert set(versions[6:]) == {__version__}
    assert steady.exact().problems == []


@pytest.mark.minio
def test_an_earlier_commit_s_bucket_is_read_and_goes_on(
    minio_environment: RealMinio, tmp_path: Path
) -> None:
    """Today's driver goes on where the old code stopped, the old one after it, and today's again.

    Today's commands find nothing wrong before that. The tables are exact. Today's code restores a
    checkpoint of the old code, to the same rows.
    """
    stored = open_bucket(tmp_path / "p")
    _call(stored, "check", str(stored.spec_file))
    _call(stored, "checkpoints", "verify", "steady", "--all", "--deep")
    _call(stored, "status", "steady")
    old = _as_version(build_earlier_wheel(tmp_path), tmp_path / "old.whl", OLD)
    new = os.pathsep.join(build_wheels(ROOT, tmp_path / "new"))
    for code, epochs in ((new, 3), (old, 1), (new, None)):
        limit = () if epochs is None else ("--epochs", str(epochs))
        assert stored.run("", *limit, environment={"PYTHONPATH": str(code)}) == 0, stored.log_text()
    made = list(read_kept_manifests(stored.log()))
    versions = [epoch.code_version for epoch in made]
    assert versions[:7] == ["0.1.0"] * 3 + [__version__] * 3 + [OLD]
    assert set(versions[7:]) == {__version__}
    _expect_all_rows(stored)
    rows = stored.content()

    back = ("--recover-to", str(made[1].id))
    assert stored.run("", *back, environment={"PYTHONPATH": str(new)}) == 0, stored.log_text()
    assert [fork.recover_to for fork in stored.log().list_forks()] == [str(made[1].id)]
    _expect_all_rows(stored)
    assert stored.content() == rows


# In CI, the test above restores one of them.
@pytest.mark.minio
@pytest.mark.long
def test_each_checkpoint_of_an_earlier_commit_is_restored(
    minio_environment: RealMinio, tmp_path: Path
) -> None:
    """Today's driver goes on from each, to the rows of a run that was never disturbed."""
    undisturbed = Steady(tmp_path / "undisturbed", OBJECTS)
    assert undisturbed.run() == 0, undisturbed.log_text()
    for checkpoint in ("beginning", "1", "2", "3"):
        stored = open_bucket(tmp_path / checkpoint)
        _call(stored, "checkpoints", "restore", "steady", checkpoint, "--yes")
        assert stored.run() == 0, stored.log_text()
        _expect_all_rows(stored)
        assert stored.content() == undisturbed.content()


def _call(pipeline: Piped, *words: str) -> None:
    """Run a command of today's in the pipeline's store; fails with what it printed."""
    done = CliRunner().invoke(app, [*words, "--store", pipeline.store_url])
    assert done.exit_code == 0, done.output


def _expect_all_rows(pipeline: Piped) -> None:
    """Each row of the inbox is in one table, and windows are as counted again."""
    report = pipeline.exact()
    assert report.problems == []
    assert sum(found["released"] + found["late"] for found in report.rows.values()) == ROWS


def _as_version(wheel: Path, copy: Path, version: str) -> Path:
    """The same code under another version's number."""
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(copy, "w") as after:
        for name in before.namelist():
            data = before.read(name)
            if name == "tidegate/__init__.py":
                line = f'__version__ = "{version}"'
                data = re.sub(rb'__version__ = ".*"', line.encode(), data)
            after.writestr(name, data)
    return copy
