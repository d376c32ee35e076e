"""Runs commands in child processes, and turns a failed child into the error of its failure class.

A child process imports what Airflow's processes must not import. This module itself is imported
when Airflow parses DAGs (a RetryRule imports the exceptions it names), so it stays light.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

from tidegate.errors import (
    ConfigurationError,
    ErrorDefinition,
    FailureClass,
    FencedError,
    PoisonError,
    TidegateError,
    TransientError,
)
from tidegate.operators.errors import COMMAND_CRASHED
from tidegate.operators.store_access import StoreAccess, build_child_environment

_ERROR_TYPES: Final = {
    kind.failure_class: kind
    for kind in (TransientError, FencedError, PoisonError, ConfigurationError)
}
_CLASS_BY_EXIT_CODE: Final = {kind.exit_code: kind for kind in FailureClass}
# Seconds. A merge reads what its windows touch, which may be a large part of the events.
_COMMAND_TIMEOUT: Final = 3600.0

CompletedChild = subprocess.CompletedProcess[str]
_running: set[subprocess.Popen[str]] = set()


def classify_exit_code(code: int) -> FailureClass | None:
    """Return the failure class of an exit code.

    None for 0 and for codes that tidegate never chooses (a signal, out of memory).
    """
    return _CLASS_BY_EXIT_CODE.get(code)


def rebuild_error(error: Mapping[str, Any]) -> TidegateError:
    """Rebuild the error that a driver reported (the shape of `TidegateError.as_dict`).

    Fields may be missing; an unknown class counts as transient.
    """
    try:
        kind = FailureClass(error.get("class", ""))
    except ValueError:
        # A newer driver may have more classes; trying again does no harm.
        kind = FailureClass.TRANSIENT
    return _ERROR_TYPES[kind](
        str(error.get("message") or "the driver failed without a message"),
        code=str(error.get("code") or "driver.failed"),
        pipeline=error.get("pipeline"),
        kept=error.get("kept"),
        advice=error.get("advice"),
        retry_after=error.get("retry_after"),
    )


def build_retry_policy(delay: timedelta) -> ExceptionRetryPolicy:
    """Return a policy: what only a person can resolve (poison, configuration) fails at once.

    Transient errors are tried again after `delay`, other errors by the task's own settings.
    """
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
                reason="the failed server or disk may be back by then",
            ),
        ]
    )


def run_child(
    access: StoreAccess, command: Sequence[str], timeout: float | None = _COMMAND_TIMEOUT
) -> CompletedChild:
    """Run a command with the store's keys in its environment, and capture its output.

    It leads a process group of its own, which is killed if the time runs out or the task ends: a
    batch run starts a JVM. A command that fails is returned like any other.

    Raises:
        subprocess.TimeoutExpired: it still ran after `timeout` seconds (None: no limit).
    """
    with subprocess.Popen(
        command,
        env=build_child_environment(access),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        _running.add(child)
        try:
            stdout, stderr = child.communicate(timeout=timeout)
        except BaseException:
            # Also a time-out and the end of the task: the child must not outlive them.
            _kill_group(child)
            raise
        finally:
            _running.discard(child)
    return CompletedChild(command, child.returncode, stdout, stderr)


def kill_children() -> None:
    """Kill what `run_child` is running. Airflow ends the task without an exception in it."""
    for child in tuple(_running):
        _kill_group(child)


def _kill_group(child: subprocess.Popen[str]) -> None:
    # kill -9 harms nothing: a command either seals its work by one PUT or leaves nothing.
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def build_child_error(
    child: CompletedChild,
    crashed: ErrorDefinition,
    pipeline: str,
    crash_codes: tuple[int, ...] = (),
) -> TidegateError:
    """Return the error of a child process that could not do its work.

    Its exit code gives the class and its last line of errors the message; the error's code is
    ``<room>.not_run``. Exit codes that tidegate never chooses, and `crash_codes`, mean a crash.
    """
    last = (child.stderr.strip().splitlines() or ["no message"])[-1][:1000]
    kind = classify_exit_code(child.returncode)
    if kind is None or child.returncode in crash_codes:
        return crashed(code=child.returncode, last=last, pipeline=pipeline)
    code = f"{crashed.code.partition('.')[0]}.not_run"
    return rebuild_error({"class": kind.value, "code": code, "message": last, "pipeline": pipeline})


def run_tidegate(
    access: StoreAccess, pipeline: str, *arguments: str, empty_on: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run `tidegate ARGUMENTS --json` and return the data of its envelope.

    An error with a code in `empty_on` gives an empty answer.

    Raises:
        TidegateError: the command's error, or a transient one if it ended without any.
        subprocess.TimeoutExpired: it still ran after an hour.
    """
    command = [sys.executable, "-m", "tidegate.jobs.cli", *arguments]
    child = run_child(access, [*command, "--store", access.url, "--json"])
    try:
        envelope = json.loads(child.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        message = (child.stderr.strip() or "no message")[-1000:]
        envelope = {"kind": "error", "data": {"message": message}}
    data: dict[str, Any] = envelope["data"]
    if envelope["kind"] != "error" and child.returncode == 0:
        return data
    # "Nothing to do" is an error for people but an answer here.
    if data.get("code") in empty_on:
        return {}
    kind = classify_exit_code(child.returncode)
    if kind is None:
        raise COMMAND_CRASHED(command=arguments[0], code=child.returncode, last=data.get("message"))
    raise rebuild_error(
        {"code": COMMAND_CRASHED.code, **data, "class": kind.value, "pipeline": pipeline}
    )
