"""New code under an old stream, and the way back.

Real drivers of two wheels, one after the other on one log: today's code under two version numbers,
and today's code beside that of an earlier commit.
"""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import pytest

from tests.e2e.drivers import Steady
from tests.named_tests import ROOT
from tests.wheels import EARLIER, build_wheel, build_wheels, export_commit
from tidegate import __version__
from tidegate.jobs.engine.recorded_epochs import read_kept_manifests

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

NEXT = f"{__version__}+next"
OLD = f"{__version__}+earlier"


# In CI, the test below goes on under other code, and back.
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


def test_an_earlier_commit_s_driver_and_today_s_take_turns(tmp_path: Path) -> None:
    """The log that old code wrote goes on under today's, and back.

    The tables are exact. Today's code restores a checkpoint of the old code, to the same rows.
    """
    earlier = build_wheel(export_commit(EARLIER, tmp_path / "earlier"), tmp_path / "old")
    old = _as_version(earlier, tmp_path / "earlier.whl", OLD)
    new = os.pathsep.join(build_wheels(ROOT, tmp_path / "new"))
    steady = Steady(tmp_path / "p", 9)
    for code, epochs in ((old, 3), (new, 3), (old, 1), (new, None)):
        limit = () if epochs is None else ("--epochs", str(epochs))
        assert steady.run("", *limit, environment={"PYTHONPATH": str(code)}) == 0, steady.log_text()
    made = list(read_kept_manifests(steady.log()))
    versions = [epoch.code_version for epoch in made]
    assert versions[:7] == [OLD] * 3 + [__version__] * 3 + [OLD]
    assert set(versions[7:]) == {__version__}
    assert steady.exact().problems == []
    rows = steady.content()

    back = ("--recover-to", str(made[1].id))
    assert steady.run("", *back, environment={"PYTHONPATH": str(new)}) == 0, steady.log_text()
    assert [fork.recover_to for fork in steady.log().list_forks()] == [str(made[1].id)]
    assert steady.exact().problems == []
    assert steady.content() == rows


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
