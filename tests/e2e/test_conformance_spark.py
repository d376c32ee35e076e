"""The conformance command on the real Spark mover."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.window_cases import CASE, COUNTED, WRONG

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_the_spark_mover_plays_the_cases(tmp_path: Path) -> None:
    """On engine spark a right case passes, a wrong one fails with its step named, one out of scope
    is skipped with the reason.
    """
    file = tmp_path / "hazelcast_window.json"
    file.write_text(json.dumps({"suite": "own", "cases": [CASE, WRONG, COUNTED]}))
    command = [sys.executable, "-m", "tests.conformance", str(file), "--engine", "spark"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    assert lines[0].startswith("failed: hazelcast_window: own.wrong: step 2 (expect): not expected")
    assert lines[1].startswith("skipped: hazelcast_window: own.counted: count triggers")
    assert lines[-1] == "1 passed, 1 failed, 1 skipped"
