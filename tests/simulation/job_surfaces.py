"""What people see of a simulated job: the log of its script, and its row of the page."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from unittest.mock import patch

import structlog
import typer
from tests.manual_clock import ManualClock

from tidegate.checkpoints.store import Store
from tidegate.jobs.driver.epoch_loop import RunOutcome
from tidegate.jobs.driver.status_reporter import DriverSteps, StatusReporter
from tidegate.jobs.sealed_queries import __main__ as entry_point
from tidegate.jobs.sealed_queries.job_run import JobOptions
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.operators import stream_view

_LINE = "three files"
_SCRIPT = f"""
import logging
logging.basicConfig(level=logging.INFO)
logging.getLogger("reader").info({_LINE!r})
"""


def keeps_script_log(spec: JobSpec, folder: Path) -> bool:
    """Launch a driver whose script has a log of its own, and return whether a line of it is there.

    Args:
        spec: of the job.
        folder: for the script and a store; it is created.
    """
    folder.mkdir()
    path = folder / "job.yaml"
    path.write_text(spec.model_dump_json(by_alias=True))
    (folder / spec.app).write_text(_SCRIPT)

    def run_script(_spec: JobSpec, options: JobOptions) -> RunOutcome:
        """Run the script alone: it has no queries."""
        run_path(str(options.script))
        return RunOutcome("finished", "the script has ended")

    with (
        _start_process() as stderr,
        patch.object(entry_point, "run_job_until_end", run_script),
        suppress(typer.Exit),
    ):
        entry_point.drive_job(path, str(folder / "store"))
    return _LINE in stderr.getvalue()


@contextmanager
def _start_process() -> Iterator[io.StringIO]:
    """Give the block the logging and the stderr of a new process."""
    root, settings = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    root.setLevel(logging.WARNING)
    try:
        with redirect_stderr(io.StringIO()) as stderr:
            yield stderr
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.captureWarnings(False)
        structlog.configure(**settings)


def list_findings(store: Store, job: str, steps: DriverSteps, clock: ManualClock) -> list[str]:
    """Return what the page calls wrong with a job whose driver reports that it runs."""
    StatusReporter(store, steps, {"pipeline": job}, clock).set_state("running")
    now = SimpleNamespace(time_ns=lambda: clock.wall_ticks() * 1000)
    with patch.object(stream_view, "time", now):
        row = stream_view.StreamView(store, job, clock=clock).summary()
    assert row["state"] == "running", row
    return [finding["says"] for finding in row["findings"]]
