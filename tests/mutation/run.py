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


@cache
def choose_tests(path: str) -> tuple[str, ...]:
    """Return the test files for a module: first those that import it, then those of its room."""
    room = path.rpartition("/")[0]
    name = Path(path).stem
    folders = [ROOT / "tests" / folder for folder in _ROOMS[room]]
    files = [file for folder in folders for file in sorted(folder.glob("test_*.py"))]
    imports = re.compile(rf"\b{name}\b")
    direct = [file for file in files if imports.search(file.read_text())]
    return tuple(str(file.relative_to(ROOT)) for file in dict.fromkeys(direct + files))


def run_tests(path: str, source: str, limit: float) -> dict[str, Any]:
    """Run the tests of a module with another source.

    Returns:
        The verdict, `killed`, `timeout` or `survived`, and how many seconds it took.
    """
    began = time.monotonic()
    process = _FORK.Process(target=_run_child, args=(path, source, choose_tests(path)))
    process.start()
    process.join(limit)
    verdict = "timeout"
    if process.is_alive():
        process.kill()
        process.join()
    else:
        verdict = "survived" if process.exitcode == 0 else "killed"
    return {"verdict": verdict, "seconds": round(time.monotonic() - began, 1)}


def _run_child(path: str, source: str, tests: tuple[str, ...]) -> None:
    os.setpgid(0, 0)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    import pytest

    name = "tidegate." + path.removesuffix(".py").replace("/", ".")
    sys.meta_path.insert(0, _MutantFinder(name, str(ROOT / path), source))
    # A mutant that leaves a thread behind must not keep the process alive.
    os._exit(int(pytest.main([*_OPTIONS, *tests])) or _simulate())


def _simulate() -> int:
    """Run the simulation for a while, with the mutant; return 1 if it finds a violation."""
    from tests.simulation.soak import soak

    return int(bool(soak(_SIMULATION_SECONDS, seed=0, jobs=1).violations))


_OPTIONS = ("-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", "unit and not slow", "--tb=no")
