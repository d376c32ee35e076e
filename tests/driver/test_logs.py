"""The driver's log lines, as another process reads them."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import logging, threading, warnings
from concurrent.futures import ThreadPoolExecutor
import structlog
from tidegate.jobs.driver.log_output import configure_logs, bind_log_context

configure_logs(json=True)
log = structlog.get_logger()
log.info("early")
with ThreadPoolExecutor(1) as pool:  # its thread is older than what it says
    pool.submit(int).result()
    bind_log_context(pipeline="p", epoch=7, attempt="a")
    pool.submit(log.warning, "from a pool").result()
log.info("own", epoch=6)
logging.getLogger("botocore.x").warning("a library says %s", "so")
logging.getLogger("botocore.x").info("not this")
warnings.warn("old", DeprecationWarning, stacklevel=1)
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("py4j").exception("with a traceback")
bind_log_context(epoch=8, attempt=None)
thread = threading.Thread(target=log.info, args=["from a thread"])
thread.start()
thread.join()
"""


def test_every_line_is_json_and_says_whose_it_is() -> None:
    """Lines of pools, threads and libraries carry pipeline, epoch and attempt as well.

    A traceback is one line.
    """
    command = [sys.executable, "-W", "default", "-c", _PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.stdout == ""
    assert all({"event", "level", "timestamp"} <= line.keys() for line in lines)
    own = [
        (line["event"][:17], line.get("pipeline"), line.get("epoch"), line.get("attempt"))
        for line in lines
    ]
    assert [line for line in own if not line[0].startswith("<string>")] == [
        ("early", None, None, None),
        ("from a pool", "p", 7, "a"),
        ("own", "p", 6, "a"),
        ("a library says so", "p", 7, "a"),
        ("with a traceback", "p", 7, "a"),
        ("from a thread", "p", 8, None),
    ]
    assert [line["logger"] for line in lines if line["event"].startswith("<string>")] == [
        "py.warnings"
    ]
    assert any("ZeroDivisionError" in line.get("exception", "") for line in lines)
