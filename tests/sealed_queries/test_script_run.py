"""A script that runs from its deployed copy reads and writes beside the file of the checkout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from pyspark import SparkContext

from tidegate.jobs.sealed_queries.script_run import run_script

SCRIPT = """\
import importlib, json, sys
from pathlib import Path
from pyspark import SparkContext
from rules_of_copy import rates

beside = Path(__file__).parent
with (beside / "seen.txt").open("a") as file:
    file.write("of the copy\\n")
computed = importlib.import_module("unseen" + "_of_checkout")
SparkContext.addPyFile(None, str(beside / "rules_of_copy/rates.py"))
SparkContext.addPyFile(None, "s3a://bucket/lib.zip")
(beside / "told.json").write_text(json.dumps([sys.argv, __name__, rates.RATES, computed.NAME]))
"""
RATES = """\
from pathlib import Path
RATES = Path(__file__).with_name("rates.csv").read_text()
Path(__file__).with_name("read.txt").write_text("once")
"""


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A copy, and a checkout whose code differs."""
    copy, checkout = tmp_path / "copy", tmp_path / "checkout"
    for folder in (copy, checkout):
        (folder / "rules_of_copy").mkdir(parents=True)
        (folder / "rules_of_copy/__init__.py").write_text("")
        (folder / "rules_of_copy/rates.py").write_text("raise ImportError")
        (folder / "app.py").write_text("raise SystemExit('edited')\n")
    (copy / "app.py").write_text(SCRIPT)
    (copy / "rules_of_copy/rates.py").write_text(RATES)
    (checkout / "rules_of_copy/rates.csv").write_text("EUR,1")
    (checkout / "unseen_of_checkout.py").write_text("NAME = 'unseen'")
    (checkout / "seen.txt").write_text("before\n")
    return copy, checkout


def test_a_copy_writes_beside_the_checkout(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do its modules; the executors get the modules of the copy."""
    copy, checkout = folders
    sent: list[str] = []
    monkeypatch.setattr(SparkContext, "addPyFile", lambda _, path: sent.append(path))
    before, listed = sys.path[:], sorted(copy.rglob("*"))
    run_script(copy / "app.py", checkout / "app.py", ["--fast"])
    assert (checkout / "seen.txt").read_text() == "before\nof the copy\n"
    assert (checkout / "rules_of_copy/read.txt").read_text() == "once"
    assert sent == [str(copy / "rules_of_copy/rates.py"), "s3a://bucket/lib.zip"]
    place = str(checkout / "app.py")
    assert json.loads((checkout / "told.json").read_text()) == [
        [place, "--fast"],
        "__main__",
        "EUR,1",
        "unseen",
    ]
    assert sorted(copy.rglob("*")) == listed
    assert sys.path == before
    assert sys.modules["__main__"].__name__ == "__main__"


def test_an_error_shows_the_line_of_the_copy(folders: tuple[Path, Path]) -> None:
    """The file of the checkout has another text there."""
    import traceback

    copy, checkout = folders
    (copy / "app.py").write_text("x = 1\nraise ValueError('of the copy')\n")
    with pytest.raises(ValueError, match="of the copy") as failed:
        run_script(copy / "app.py", checkout / "app.py", [])
    assert "raise ValueError('of the copy')" in "".join(traceback.format_exception(failed.value))
