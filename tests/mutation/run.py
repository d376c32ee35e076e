"""Run the tests against one mutant, in a process of its own.

The process is forked from one that has imported the libraries but no module of the product. It
imports the mutated source in place of the file, and no file is changed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import time
from collections.abc import Sequence
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import psutil

from tests.mutation.mutants import ROOT

# What the tests of the core import. A process that has them starts in a third of the time.
LIBRARIES = (
    "boto3",
    "duckdb",
    "numpy",
    "pandas",
    "pyarrow.parquet",
    "pydantic",
    "pyiceberg.table",
    "pytest",
    "structlog",
    "typer",
)
_ROOMS = {
    "checkpoints": ("checkpoints",),
    "jobs/engine": ("engine", "checkpoints", "driver"),
    "jobs/eventtime": ("eventtime", "conformance", "oracle", "engine"),
    "jobs/sinks": ("sinks", "engine"),
}
_SIMULATION_SECONDS = 15.0
_PASSED = (0, 5)  # exit codes of pytest: all passed, or all files hold slow tests only
_BUSY = 10  # times the limit, by the clock on the wall: a mutant that waits for ever
_FORK = get_context("fork")


class _MutatedSource(importlib.machinery.SourceFileLoader):
    """Compiles the mutated source instead of the file's."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        """Compile; no bytecode is cached."""
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _MutantFinder(importlib.abc.MetaPathFinder):
    """Finds the mutated module before anybody else does."""

    def __init__(self, name: str, path: str, source: str) -> None:
        self._name, self._loader = name, _MutatedSource(name, path, source)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the mutated module, or None for any other."""
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(
            fullname, self._loader.path, loader=self._loader
        )


def import_libraries() -> None:
    """Import what the tests need, before the first fork."""
    for name in LIBRARIES:
        importlib.import_module(name)


def choose_tests(path: str) -> tuple[str, ...]:
    """Return the test files for a module: first those that import it, then those of its room."""
    direct, others = _split_tests(path)
    return direct + others


@cache
def _split_tests(path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    room = path.rpartition("/")[0]
    name = Path(path).stem
    folders = [ROOT / "tests" / folder for folder in _ROOMS[room]]
    files = [file for folder in folders for file in sorted(folder.glob("test_*.py"))]
    imports = re.compile(rf"\b{name}\b")
    direct = [file for file in files if imports.search(file.read_text())]
    others = [file for file in files if file not in direct]
    return _name_files(direct), _name_files(others)


def _name_files(files: Sequence[Path]) -> tuple[str, ...]:
    return tuple(str(file.relative_to(ROOT)) for file in files)


def run_tests(path: str, source: str, limit: float, *, quick: bool = False) -> dict[str, Any]:
    """Run the tests of a module with another source.

    Args:
        path: the module.
        source: its other source.
        limit: processor seconds.
        quick: only the tests that import the module, without the simulation.

    Returns:
        The verdict, `killed`, `timeout` or `survived`, and how many seconds it took. A quick run
        only says `killed` or `unsure`.
    """
    began = time.monotonic()
    direct, others = _split_tests(path)
    stages = (direct,) if quick else (direct, others)
    process = _FORK.Process(target=_run_child, args=(path, source, stages, quick))
    process.start()
    while process.is_alive() and not _is_over(process.pid or 0, limit, began):
        process.join(1.0)
    verdict = "timeout"
    if process.is_alive():
        process.kill()
        process.join()
    else:
        verdict = "survived" if process.exitcode == 0 else "killed"
    if quick and verdict != "killed":
        verdict = "unsure"
    return {"verdict": verdict, "seconds": round(time.monotonic() - began, 1)}


def _is_over(pid: int, limit: float, began: float) -> bool:
    """Whether a mutant hangs: by processor seconds, because the machine may be busy."""
    try:
        spent = sum(psutil.Process(pid).cpu_times()[:4])
    except psutil.NoSuchProcess:
        return False
    return spent > limit or time.monotonic() - began > _BUSY * limit


def _run_child(path: str, source: str, stages: Sequence[tuple[str, ...]], quick: bool) -> None:
    os.setpgid(0, 0)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    import pytest

    name = "tidegate." + path.removesuffix(".py").replace("/", ".")
    sys.meta_path.insert(0, _MutantFinder(name, str(ROOT / path), source))
    # Most mutants die in the first stage, without the time for collecting the others.
    failed = any(pytest.main([*_OPTIONS, *tests]) not in _PASSED for tests in stages if tests)
    # A mutant that leaves a thread behind must not keep the process alive.
    os._exit(int(failed or (not quick and _simulate())))


def _simulate() -> int:
    """Run the simulation for a while, with the mutant; return 1 if it finds a violation."""
    from tests.simulation.soak import soak

    return int(bool(soak(_SIMULATION_SECONDS, seed=0, jobs=1).violations))


_OPTIONS = ("-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", "unit and not slow", "--tb=no")
