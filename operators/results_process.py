"""Keeps a process that reads tables and rows for the Streams page.

Airflow's own processes must not import the table libraries.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
from typing import Any, Final

from tidegate.operators.child_processes import rebuild_error
from tidegate.operators.errors import PAGE_BUSY, RESULTS_CRASHED
from tidegate.operators.store_access import StoreAccess, build_child_environment

_LOCK_PATIENCE: Final = 2.0  # seconds; each waiting request holds a thread of the API server
_ANSWER_TIMEOUT: Final = 15.0  # seconds; the page waits for 20
_START_PATIENCE: Final = 10.0  # seconds; then the page asks again


class ResultsProcess:
    """Starts `jobs/cli/page_results.py` at the first question and again when it has ended.

    Args:
        access: the store that it reads.
    """

    def __init__(self, access: StoreAccess) -> None:
        self._access, self._lock = access, threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._is_ready = False

    def ask(self, pipeline: str, ask: str, arguments: dict[str, str]) -> dict[str, Any]:
        """Return the answer to one question; one is asked at a time.

        Raises:
            TidegateError: the question cannot be answered, or not within 15 s.
            TransientError: another question is being answered, or the process is still starting.
        """
        if not self._lock.acquire(timeout=_LOCK_PATIENCE):
            raise PAGE_BUSY(what=f"tables of {pipeline} are being read", pipeline=pipeline)
        try:
            line = self._exchange({"pipeline": pipeline, "ask": ask, "arguments": arguments})
        finally:
            self._lock.release()
        if not line:
            raise RESULTS_CRASHED(pipeline=pipeline, seconds=_ANSWER_TIMEOUT)
        answer = json.loads(line)
        if "error" in answer:
            raise rebuild_error(answer["error"])
        data: dict[str, Any] = answer["data"]
        return data

    def _exchange(self, question: dict[str, Any]) -> str:
        """Send a line and return the answer's; empty if there is none in time."""
        child = self._require_ready_child()
        try:
            print(json.dumps(question), file=child.stdin, flush=True)
        except BrokenPipeError:
            return ""
        line = _read_line(child, _ANSWER_TIMEOUT)
        if not line:
            self.stop()  # its late answer must not be taken for the next one
        return line

    def _require_ready_child(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None:
            command = [sys.executable, "-P", "-m", "tidegate.jobs.cli.page_results"]
            environment = build_child_environment(self._access)
            self._child = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._is_ready = False
        # Its first line says that its imports are done, which takes long on a busy machine.
        self._is_ready = self._is_ready or bool(_read_line(self._child, _START_PATIENCE))
        if not self._is_ready:
            raise PAGE_BUSY(what="the reader of tables is starting")
        return self._child

    def stop(self) -> None:
        """Kill the process; the next question starts another one."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()

    __del__ = stop


def _read_line(child: subprocess.Popen[str], patience: float) -> str:
    """A line of its output; empty if it ends, or is silent for so many seconds."""
    assert child.stdout is not None  # noqa: S101 - it is a pipe
    return child.stdout.readline() if select.select([child.stdout], [], [], patience)[0] else ""
