"""The last words of a driver are its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A connection that is never freed, as those of a job whose threads of py4j go on.
_LEAK = """
import atexit, ctypes, sys
HIDE
import duckdb
ctypes.pythonapi.Py_IncRef(ctypes.py_object(duckdb.connect()))
atexit.register(lambda: sys.stderr.write("the script's own end\\n"))
sys.stderr.write("finished\\n")
sys.exit(3)
"""


@pytest.mark.parametrize("hidden", [True, False])
def test_no_report_of_leaks_follows_the_last_words(hidden: bool) -> None:
    """What the script says at its end is kept, and so is the exit code.

    Without the remedy DuckDB reports: otherwise this would prove nothing.
    """
    hide = "from tidegate.jobs.driver.leak_reports import drop_leak_reports; drop_leak_reports()"
    script = _LEAK.replace("HIDE", hide if hidden else "")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.startswith("finished\nthe script's own end\n")
    assert ("leaked" in done.stderr) is not hidden
