"""`tidegate ... --json` as a process: what the Airflow side may not import, it asks for in words."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final

from tidegate.jobs.spec.errors import TransientError
from tidegate.operators.access import StoreAccess, child_environment
from tidegate.operators.failures import class_of_exit, failure_of

__all__ = ["run_tidegate"]

_CRASHED: Final = "airflow.command_crashed"
_TIME_OUT: Final = 3600.0  # seconds; a merge reads what its windows touch, which may be a large part of the events


def run_tidegate(access: StoreAccess, pipeline: str, *arguments: str, nothing: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run one command and give back the data of its envelope; an error with a code in `nothing` is an empty answer.

    Raises:
        TidegateError: as the command said, or transient when it ended without a word.
    """
    command = [sys.executable, "-m", "tidegate.jobs.cli", *arguments, "--store", access.url, "--json"]
    environment = child_environment(access)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIME_OUT, check=False)
    ended = f"tidegate {arguments[0]} ended with code {done.returncode}"
    try:
        said = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = {"kind": "error", "data": {"message": (done.stderr.strip() or "no message")[-1000:]}}
    data: dict[str, Any] = said["data"]
    if said["kind"] != "error" and done.returncode == 0:
        return data
    if data.get("code") in nothing:
        return {}
    kind = class_of_exit(done.returncode)
    if kind is None:
        raise TransientError(f"{ended}: {data.get('message')}", code=_CRASHED)
    raise failure_of({"code": _CRASHED, **data, "class": kind.value, "pipeline": pipeline})
