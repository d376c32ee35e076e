"""`tidegate ... --json` as a process: what the Airflow side may not import, it asks for in words."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final

from tidegate.jobs.spec.errors import TransientError
from tidegate.operators.access import StoreAccess, build_child_environment
from tidegate.operators.failures import classify_exit_code, rebuild_error

__all__ = ["run_tidegate"]

_CRASH_CODE: Final = "airflow.command_crashed"
_COMMAND_TIMEOUT: Final = 3600.0  # seconds; a merge reads what its windows touch, which may be a large part of the events


def run_tidegate(access: StoreAccess, pipeline: str, *arguments: str, nothing: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run one command and give back the data of its envelope; an error with a code in `nothing` is an empty answer.

    Raises:
        TidegateError: as the command said, or transient when it ended without a word.
    """
    command = [sys.executable, "-m", "tidegate.jobs.cli", *arguments, "--store", access.url, "--json"]
    environment = build_child_environment(access)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT, check=False)
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
    kind = classify_exit_code(done.returncode)
    if kind is None:
        raise TransientError(f"{ended}: {data.get('message')}", code=_CRASH_CODE)
    raise rebuild_error({"code": _CRASH_CODE, **data, "class": kind.value, "pipeline": pipeline})
