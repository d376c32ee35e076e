"""What a fold may do to the world: read it, and import; nothing else."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest

from tidegate.jobs.streams import reducers
from tidegate.jobs.streams.reducers import SideEffectError, refuse_side_effects


def write_low(path: Path) -> None:
    """Without `open`."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))


@pytest.mark.parametrize(
    "effect",
    [
        lambda path: path.write_text("x"),
        write_low,
        lambda path: path.mkdir(),
        lambda path: os.rename(path.parent, path),
        lambda path: subprocess.run([sys.executable, "-V"], check=True),
    ],
)
def test_effects_are_refused_even_when_swallowed(
    effect: Callable[[Path], object], tmp_path: Path
) -> None:
    """The attempt raises, nothing happens, and code that hides the error is found out."""
    target = tmp_path / "made"
    with pytest.raises(SideEffectError):
        hidden(effect, target)
    assert not target.exists()


def hidden(effect: Callable[[Path], object], target: Path) -> None:
    """Runs it under the guard, and swallows what it raises."""
    with refuse_side_effects() as raise_refused:
        with contextlib.suppress(Exception):
            effect(target)
        raise_refused()


def test_the_end_of_an_inner_block_allows_nothing(tmp_path: Path) -> None:
    """The outer block still refuses, and has what it refused before."""
    with refuse_side_effects() as outer:
        with contextlib.suppress(SideEffectError):
            (tmp_path / "made").mkdir()
        with refuse_side_effects() as inner:
            inner()
        with pytest.raises(SideEffectError):
            outer()
        with pytest.raises(SideEffectError):
            (tmp_path / "made").mkdir()


def test_reading_and_importing_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module imported inside a fold may have its cache written by the interpreter.

    Outside the guard all is as ever.
    """
    (tmp_path / "fresh_module.py").write_text("ANSWER = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    with refuse_side_effects() as raise_refused:
        assert importlib.import_module("fresh_module").ANSWER == 42
        assert (tmp_path / "fresh_module.py").read_text() == "ANSWER = 42\n"
        raise_refused()
    (tmp_path / "after").write_text("x")
    sys.modules.pop("fresh_module")


def test_threads_that_begin_together_install_one_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook stays until the process ends."""
    hooks: list[Any] = []
    all_begin, second = Barrier(3, timeout=30), Event()

    def add_hook(hook: Any) -> None:
        """Wait for a second thread to come here, which none may do."""
        hooks.append(hook)
        if len(hooks) > 1:
            second.set()
        second.wait(0.05)

    def run_fold(_: int) -> None:
        """Do nothing under the guard."""
        all_begin.wait()
        with refuse_side_effects():
            pass

    install = cache(reducers._install_audit_hook.__wrapped__)
    monkeypatch.setattr(reducers, "_install_audit_hook", install)
    monkeypatch.setattr(sys, "addaudithook", add_hook)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run_fold, range(3)))
    assert len(hooks) == 1
