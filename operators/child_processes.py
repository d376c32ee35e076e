"""From what a driver left behind to the one failure taxonomy, and from there to Airflow's RetryPolicy.

This module is imported at DAG parse (a RetryRule imports the exceptions it names), so it stays
light.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

from tidegate.errors import (
    ConfigurationError,
    FailureClass,
    FencedError,
    PoisonError,
    TidegateError,
    TransientError,
)
from tidegate.operators.store_access import StoreAccess, build_child_environment

_ERROR_TYPES: Final[dict[FailureClass, type[TidegateError]]] = {
    FailureClass.TRANSIENT: TransientError,
    FailureClass.FENCED: FencedError,
    FailureClass.POISON: PoisonError,
    FailureClass.CONFIGURATION: ConfigurationError,
}
_CLASS_BY_EXIT_CODE: Final = {kind.exit_code: kind for kind in FailureClass}


class DriverLostError(TransientError):
    """The driver vanished again and again without sealing anything.

    Airflow tries again with its own back-off.
    """


def classify_exit_code(code: int) -> FailureClass | None:
    """The failure class of a driver's exit code.

    None for 0 and for codes no driver chooses (a signal, out of memory).
    """
    return _CLASS_BY_EXIT_CODE.get(code)


def rebuild_error(error: Mapping[str, Any]) -> TidegateError:
    """Rebuild the error that a driver reported (the shape of `TidegateError.as_dict`)."""
    try:
        kind = FailureClass(error.get("class", ""))
    except ValueError:
        kind = (
            FailureClass.TRANSIENT
        )  # a newer driver may know more classes; trying again does no harm
    return _ERROR_TYPES[kind](
        str(error.get("message") or "the driver failed without a message"),
        code=str(error.get("code") or "driver.failed"),
        pipeline=error.get("pipeline"),
        kept=error.get("kept"),
        advice=error.get("advice"),
        retry_after=error.get("retry_after"),
    )


def build_retry_policy(delay: timedelta) -> ExceptionRetryPolicy:
    """Poison and configuration wait for a person; everything else is tried again after `delay`."""
    final = [f"{kind.__module__}.{kind.__name__}" for kind in (PoisonError, ConfigurationError)]
    return ExceptionRetryPolicy(
        rules=[
            RetryRule(
                exception=list(final),
                action=RetryAction.FAIL,
                reason="trying again meets the same fault",
            ),
            RetryRule(
                exception=f"{TransientError.__module__}.{TransientError.__name__}",
                action=RetryAction.RETRY,
                retry_delay=delay,
                reason="the world may be better by then",
            ),
        ]
    )


# `tidegate ... --json` as a process: what the Airflow side may not import, it asks for in words.

_CRASH_CODE: Final = "airflow.command_crashed"
_COMMAND_TIMEOUT: Final = (
    3600.0  # seconds; a merge reads what its windows touch, which may be a large part of the events
)


def run_tidegate(
    access: StoreAccess, pipeline: str, *arguments: str, nothing: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run one command and give back the data of its envelope.

    An error with a code in `nothing` is an empty answer.

    Raises:
        TidegateError: as the command said, or transient when it ended without a word.
    """
    command = [
        sys.executable,
        "-m",
        "tidegate.jobs.cli",
        *arguments,
        "--store",
        access.url,
        "--json",
    ]
    environment = build_child_environment(access)
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT,
        check=False,
    )
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
