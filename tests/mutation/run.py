"""Judge a mutant: by the tests that execute the changed line, then by the simulation.

No file is changed. The libraries are imported before the first fork, the product is not.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from tests.mutation.covering import Covering, Recorder, mark_source, write_covering
from tests.mutation.mutants import CORE, ROOT, Mutant
from tests.mutation.session import (
    FORK,
    Session,
    Verdict,
    compile_source,
    run_fork,
    run_items,
    run_pytest,
    silence,
)

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
ROOMS = (
    "checkpoints",
    "engine",
    "driver",
    "eventtime",
    "conformance",
    "oracle",
    "sinks",
    "streams",
)
_SIMULATION_SECONDS = 15.0
_QUICK = 10.0  # processor seconds of tests
_LEAST, _TIMES = 20.0, 5.0  # a mutant may take this many seconds, and this many times the original


class _ChangedSource(importlib.machinery.SourceFileLoader):
    """Compiles another source instead of the file's."""

    def __init__(self, name: str, path: str, source: str | ast.Module) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        """Compile; no bytecode is cached."""
        return compile_source(self._source, self.path)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the changed modules before anybody else does."""

    def __init__(self, sources: Mapping[str, str | ast.Module]) -> None:
        self._loaders = {}
        for path, source in sources.items():
            name = "tidegate." + path.removesuffix(".py").replace("/", ".")
            self._loaders[name] = _ChangedSource(name, str(ROOT / path), source)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a changed module, or None for any other."""
        loader = self._loaders.get(fullname)
        if loader is None:
            return None
        return importlib.util.spec_from_file_location(fullname, loader.path, loader=loader)


def import_libraries() -> None:
    """Import what the tests need, before the first fork."""
    for name in LIBRARIES:
        importlib.import_module(name)


def list_tests() -> list[str]:
    """Return the test files of the rooms of the core."""
    folders = [ROOT / "tests" / room for room in ROOMS]
    files = (file for folder in folders for file in sorted(folder.glob("test_*.py")))
    return [str(file.relative_to(ROOT)) for file in files]


def record_covering(files: Sequence[str], place: Path) -> None:
    """Run test files without a mutant, in a process of its own, and keep which lines they pass."""
    process = FORK.Process(target=_record, args=(files, place))
    process.start()
    process.join()


def _record(files: Sequence[str], place: Path) -> None:
    silence()
    sys.meta_path.insert(0, _Finder({path: mark_source(path) for path in CORE}))
    recorder = Recorder()
    run_pytest(files, recorder)
    recorder.covering.files = frozenset(files)
    write_covering(recorder.covering, place)
    os._exit(0)


def judge_mutant(
    mutant: Mutant, covering: Covering, session: Session, limit: float, *, quick: bool
) -> dict[str, Any]:
    """Run the tests that execute the mutant's line, and the simulation if they pass.

    Args:
        mutant: what to judge.
        covering: of the tests that the session has collected.
        session: of the original.
        limit: processor seconds, at most.
        quick: leave out the simulation, and the tests beyond ten processor seconds.

    Returns:
        The verdict, `killed`, `timeout` or `survived`, how many tests were chosen, which one failed
        and how many seconds it took. A quick run says `unsure` instead of `survived`.
    """
    began, source = time.monotonic(), mutant.read_source()
    chosen = covering.choose_tests(mutant.path, mutant.line)
    tests = covering.cut_tests(chosen, _QUICK) if quick else chosen
    limit = min(limit, _LEAST + _TIMES * covering.sum_cpu(tests))
    found = session.run(mutant.path, source, tests, limit)
    if found.what == "import":
        found = run_fork(lambda: _run_import(mutant.path, source, tests), limit)
        if (
            found.test in tests
            and session.run(mutant.path, _read(mutant.path), [found.test], limit).test
        ):
            found = Verdict("survived")  # the test fails without the mutant as well
    what = found.what
    if what == "survived":
        seen = quick or run_fork(lambda: _simulate(mutant.path, source), 10 * _SIMULATION_SECONDS)
        what = "unsure" if seen is True else seen.what
        if not chosen and what == "unsure":
            what = "survived"  # no test executes it
    seconds = round(time.monotonic() - began, 1)
    return {"verdict": what, "tests": len(tests), "test": found.test, "seconds": seconds}


def _read(path: str) -> str:
    return (ROOT / path).read_text()


def _run_import(path: str, source: str, tests: Sequence[str]) -> str:
    """Run tests in a session that imports another source."""
    silence()
    sys.meta_path.insert(0, _Finder({path: source}))
    runner = _Runner(tests)
    code = run_pytest(sorted({name.partition("::")[0] for name in tests}), runner)
    return runner.failed if runner.ran else f"pytest ends with {code}" * bool(tests)


class _Runner:
    """Runs some tests, in their order, until one fails."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._tests, self.failed, self.ran = tests, "", False

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run instead of pytest."""
        items = {item.nodeid: item for item in session.items}
        if all(name in items for name in self._tests):  # otherwise the mutant broke an import
            self.ran = True
            self.failed = run_items(session, [items[name] for name in self._tests], [])
        return True


def _simulate(path: str, source: str) -> str:
    """Run the simulation for a while, with the mutant; return its name if it finds a violation."""
    silence()
    sys.meta_path.insert(0, _Finder({path: source}))
    from tests.simulation.soak import soak

    return "simulation" * bool(soak(_SIMULATION_SECONDS, seed=0, jobs=1).violations)
