"""The example of edge events, by real drivers.

On other partitions half-way, and restored to where machines were on.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.drivers import Piped

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def with_parallelism(cores: int, partitions: int) -> str:
    """The example, which here ends, on so many cores and with so many shuffle partitions."""
    spec = (
        (EXAMPLES / "machines.yaml")
        .read_text()
        .replace("limits: {objects: 2}", "limits: {objects: 2}\n    bounded: true")
    )
    conf = f'conf: {{spark.sql.shuffle.partitions: "{partitions}"}}'
    return spec.replace(
        "spark: {", f"spark: {{driver_memory: 1g, master: 'local[{cores}]', {conf}, "
    )


def test_machines_that_are_on_stay_on_through_a_restore(tmp_path: Path) -> None:
    """Three epochs, the rest on other partitions: exact.

    Restored to the third and run again: the same rows.
    """
    machines = Piped(tmp_path, with_parallelism(1, 2))
    generator = [sys.executable, str(EXAMPLES / "machines.py"), str(machines.inbox)]
    subprocess.run(generator, check=True, capture_output=True, timeout=120)
    (machines.inbox / "inbox" / "machines" / "_DONE").touch()
    assert machines.run("", "--epochs", "3") == 0, machines.log_text()
    middle = machines.log().head()
    assert middle.record is not None
    assert sum(file.rows for file in middle.record.segments if file.kind == "edges") > 1
    machines.change_spec(with_parallelism(2, 5))
    assert machines.run() == 0, machines.log_text()
    found = machines.exact()
    assert (found.problems, found.skipped) == ([], {})
    assert (
        found.windows["per_minute"] == 62
    )  # each minute of the hour, and the one in which the clock strikes
    content = machines.content()
    restore = [
        sys.executable,
        "-m",
        "tidegate.jobs.cli",
        "checkpoints",
        "restore",
        str(machines.spec_file),
        str(middle.checkpoint),
    ]
    options = ["--why", "again", "--yes", "--store", machines.store_url]
    done = subprocess.run(
        [*restore, *options], capture_output=True, text=True, timeout=900, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert machines.run() == 0, machines.log_text()
    assert machines.content() == content
    assert machines.exact().problems == []
