"""The demo as a user runs it, on two days of flights, with keys of the documented roles.

Airflow, Spark, MinIO, a kill, a restore, quality, exact tables.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_demo_ends_by_itself_and_is_exact(tmp_path: Path) -> None:
    """Exit code 0 means.

    Recovered after kill -9, restored by hand, stream ended green, tables exact.
    """
    command = [
        sys.executable,
        "-m",
        "tests.e2e.demo_with_roles",
        "--days",
        "2",
        "--home",
        str(tmp_path / "stack"),
    ]
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("TIDEGATE_", "AIRFLOW"))
    }
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1700,
        env=environment,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert "Every row in exactly one place" in said
    assert "the stack's keys have the role of a driver" in said
    assert "the stack is down" in said
