"""The log of a job's script is the script's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s of mine: %(message)s")
logging.getLogger("reader").info("three files")
"""
_SUPERVISED = "supervised.drive_job(path, store)"
_AT_THE_TERMINAL = "run_commands.run_in_foreground(str(path), store)"


def test_a_script_configures_the_root_logger(tmp_path: Path) -> None:
    """As without tidegate: `basicConfig` does nothing where a handler is already."""
    for start in (_SUPERVISED, _AT_THE_TERMINAL):
        assert "INFO of mine: three files" in _run_script(tmp_path, start)


def _run_script(folder: Path, start: str) -> str:
    """Start a job without Spark, and return what it has logged."""
    (folder / "job.yaml").write_text("{kind: job, name: clicks, app: script.py}")
    (folder / "script.py").write_text(_SCRIPT)
    code = f"""
import runpy
from pathlib import Path
from tidegate.jobs.cli import run_commands
from tidegate.jobs.driver.epoch_loop import RunOutcome
from tidegate.jobs.sealed_queries import __main__ as supervised, job_run

def run_job(spec, options):
    runpy.run_path(str(options.script))
    return RunOutcome("finished", "the script has ended")

supervised.run_job_until_end = job_run.run_job_until_end = run_job
path, store = Path({str(folder / "job.yaml")!r}), {str(folder / "store")!r}
{start}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stderr
