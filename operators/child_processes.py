"""Runs commands in child processes, and turns a failed child into the error of its failure class.

A child process imports what Airflow's processes must not import. This module itself is imported
when Airflow parses DAGs (a RetryRule imports the exceptions it names), so it stays light.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import MappingProxyType

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
from tidegate.json_types import JsonObject, JsonView

from .errors import COMMAND_CRASHED, PAGE_BUSY, RESULTS_CRASHED
from .store_access import StoreAccess, build_child_environment

_ERROR_TYPES = {
    kind.failure_class: kind
    for kind in (TransientError, FencedError, PoisonError, ConfigurationError)
}
_CLASS_BY_EXIT_CODE = {kind.exit_code: kind for kind in FailureClass}
# Seconds. A merge reads what its windows touch, which may be a large part of the events.
_COMMAND_TIMEOUT = 3600.0
# Of the process that answers the Streams page, in seconds: each waiting request holds a thread of
# the API server; the page waits for 20; while the process starts, the page asks again.
_LOCK_PATIENCE = 2.0
_ANSWER_TIMEOUT = 15.0
_START_PATIENCE = 10.0

CompletedChild = subprocess.CompletedProcess[str]
_running: set[subprocess.Popen[str]] = set()


def classify_exit_code(code: int) -> FailureClass | None:
    """Return the failure class of an exit code.

    None for 0 and for codes that tidegate never chooses (a signal, out of memory).
    """
    return _CLASS_BY_EXIT_CODE.get(code)


def rebuild_error(error: JsonView) -> TidegateError:
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
    access: StoreAccess,
    command: Sequence[str],
    timeout: float | None = _COMMAND_TIMEOUT,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> CompletedChild:
    """Run a command with the store's keys and `settings` in its environment; capture its output.

    It leads a process group of its own, which is killed if the time runs out or the task ends: a
    batch run starts a JVM. A command that fails is returned like any other.

    Raises:
        subprocess.TimeoutExpired: it still ran after `timeout` seconds (None: no limit).
    """
    with subprocess.Popen(
        command,
        env={**build_child_environment(access), **settings},
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
    access: StoreAccess,
    pipeline: str,
    *arguments: str,
    empty_on: tuple[str, ...] = (),
    crashed: ErrorDefinition = COMMAND_CRASHED,
) -> JsonObject:
    """Run `tidegate ARGUMENTS --json` and return the data of its envelope.

    An error with a code in `empty_on` gives an empty answer.

    Raises:
        TidegateError: the command's error, or `crashed` if it ended without any.
        subprocess.TimeoutExpired: it still ran after an hour.
    """
    # -P: without it Python would look for packages in the worker's folder first.
    command = [sys.executable, "-P", "-m", "tidegate.jobs.cli", *arguments]
    child = run_child(access, [*command, "--store", access.url, "--json"])
    try:
        envelope = json.loads(child.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        message = (child.stderr.strip() or "no message")[-1000:]
        envelope = {"kind": "error", "data": {"message": message}}
    data: JsonObject = envelope["data"]
    if envelope["kind"] != "error" and child.returncode == 0:
        return data
    # "Nothing to do" is an error for people but an answer here.
    if data.get("code") in empty_on:
        return {}
    kind = classify_exit_code(child.returncode)
    if kind is None:
        last = data.get("message")
        raise crashed(command=arguments[0], code=child.returncode, last=last, pipeline=pipeline)
    raise rebuild_error({"code": crashed.code, **data, "class": kind.value, "pipeline": pipeline})


class ResultsProcess:
    """Keeps a process that reads tables and rows for the Streams page: `jobs/cli/page_results.py`.

    It is started at the first question, and again when it has ended.

    Args:
        access: the store that it reads.
    """

    def __init__(self, access: StoreAccess) -> None:
        self._access, self._lock = access, threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._is_ready = False

    def ask(self, pipeline: str, ask: str, arguments: dict[str, str]) -> JsonObject:
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
        data: JsonObject = answer["data"]
        return data

    def _exchange(self, question: JsonObject) -> str:
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
            # Not `__del__`: the interpreter may close the pipes before it calls that.
            self._end_child = weakref.finalize(self, _end_child, self._child)
            self._is_ready = False
        # Its first line says that its imports are done, which takes long on a busy machine.
        self._is_ready = self._is_ready or bool(_read_line(self._child, _START_PATIENCE))
        if not self._is_ready:
            raise PAGE_BUSY(what="the reader of tables is starting")
        return self._child

    def stop(self) -> None:
        """Kill the process; the next question starts another one."""
        if self._child is not None:
            self._end_child()


def _end_child(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None  # noqa: S101 - it is a pipe
        # What was not sent yet has no reader any more.
        with suppress(BrokenPipeError):
            pipe.close()


def _read_line(child: subprocess.Popen[str], patience: float) -> str:
    """A line of its output; empty if it ends, or is silent for so many seconds."""
    assert child.stdout is not None  # noqa: S101 - it is a pipe
    return child.stdout.readline() if select.select([child.stdout], [], [], patience)[0] else ""
