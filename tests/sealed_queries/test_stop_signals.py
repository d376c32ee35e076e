"""Signals that stop a job whose script has handlers of its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from tidegate.jobs.driver.pipeline_run import stop_on_signals
from tidegate.jobs.sealed_queries.stop_signals import keep_stop_handlers


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    """Set by SIGTERM and SIGINT, as in a driver, while a script may install handlers."""
    event = threading.Event()
    with stop_on_signals(event), keep_stop_handlers():
        yield event


def test_a_handler_of_the_script_does_not_replace_the_stop(stop: threading.Event) -> None:
    """It is called after the stop was noted, and can be read and put back."""
    seen: list[bool] = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(stop.is_set()))
    signal.raise_signal(signal.SIGTERM)
    assert seen == [True]
    signal.signal(signal.SIGTERM, before)
    signal.raise_signal(signal.SIGTERM)
    assert seen == [True]


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_script_cannot_ignore_a_stop(stop: threading.Event, ignored: signal.Handlers) -> None:
    """Neither is the process ended at once."""
    signal.signal(signal.SIGTERM, ignored)
    signal.raise_signal(signal.SIGTERM)
    assert stop.is_set()


def test_the_handler_of_pyspark_does_not_cancel_the_batch(stop: threading.Event) -> None:
    """Ctrl-C lets the batch end; PySpark would cancel its jobs and raise an error."""

    def cancel_jobs(*_: object) -> None:
        raise AssertionError

    cancel_jobs.__module__ = "pyspark.core.context"
    signal.signal(signal.SIGINT, cancel_jobs)
    signal.raise_signal(signal.SIGINT)
    assert stop.is_set()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_other_signals_and_the_time_after_the_script_are_as_usual() -> None:
    """The handlers of the script do not outlive the driver's."""
    before = signal.getsignal(signal.SIGTERM), signal.signal
    with stop_on_signals(threading.Event()), keep_stop_handlers():
        signal.signal(signal.SIGTERM, lambda *_: None)
        usual = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        signal.signal(signal.SIGUSR1, usual)
    assert (signal.getsignal(signal.SIGTERM), signal.signal) == before
