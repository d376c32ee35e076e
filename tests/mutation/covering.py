"""Which tests execute which statements of the trusted core: a mutant is shown only to those.

Every statement of a function is marked, in memory, when the tests import the module. The marks that
a test passes are noted with the time that it takes. What a fixture passes counts for all tests of
its file, because pytest may keep the fixture from one test to the next.
"""

from __future__ import annotations

import ast
import builtins
import json
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.mutants import CORE, ROOT

_MARK = "__passed__"  # a name of this form is never mangled inside a class
_LINES = 100_000  # more than a module has; a mark is the module's number times this, plus the line
_PASSED: set[int] = set()


@dataclass(frozen=True)
class CoveringTest:
    """What a test passes, as marks, and seconds of the processor and of the clock that it takes."""

    cpu: float
    seconds: float
    marks: frozenset[int]


@dataclass
class Covering:
    """The tests that pass without a mutant.

    Attributes:
        imported: marks that are passed while modules are imported, before any test.
        failed: tests that failed without a mutant; they judge nothing.
        files: those whose tests were run.
    """

    tests: dict[str, CoveringTest] = field(default_factory=dict)
    imported: frozenset[int] = frozenset()
    failed: tuple[str, ...] = ()
    files: frozenset[str] = frozenset()

    def add(self, other: Covering) -> None:
        """What the tests of further files pass."""
        self.tests.update(other.tests)
        self.imported |= other.imported
        self.failed += other.failed
        self.files |= other.files

    def choose_tests(self, path: str, line: int) -> list[str]:
        """Return the tests that execute a line of a module, the quickest first.

        A line outside of functions is executed by every test that passes any mark of the module.
        """
        base = CORE.index(path) * _LINES
        mark = base + find_statement(path, line)
        whole = mark == base or mark in self.imported
        found = [
            name
            for name, test in self.tests.items()
            if (
                any(base < one < base + _LINES for one in test.marks)
                if whole
                else mark in test.marks
            )
        ]
        return sorted(found, key=lambda name: (self.tests[name].seconds, name))

    def cut_tests(self, tests: Sequence[str], cpu: float) -> list[str]:
        """Return the first tests that take no more than some processor seconds together."""
        sums = accumulate(self.tests[name].cpu for name in tests)
        return [name for name, spent in zip(tests, sums, strict=True) if spent <= cpu]

    def sum_cpu(self, tests: Sequence[str]) -> float:
        """Return the processor seconds of some tests."""
        return sum(self.tests[name].cpu for name in tests)


def mark_source(path: str) -> ast.Module:
    """Parse a module and put a mark before each statement of its functions."""
    return mark_tree(ast.parse((ROOT / path).read_text()), CORE.index(path) * _LINES)


def mark_tree(tree: ast.Module, base: int) -> ast.Module:
    """Put a mark, `base` plus the line, before each statement of functions."""
    _Marking(base).visit(tree)
    return ast.fix_missing_locations(tree)


class _Marking(ast.NodeTransformer):
    """Puts a mark before each statement inside of functions."""

    def __init__(self, base: int) -> None:
        self._base, self._depth = base, 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Mark the body."""
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Mark every list of statements below a function."""
        super().generic_visit(node)
        for name, value in ast.iter_fields(node) if self._depth else ():
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, name, [part for one in value for part in self._mark(one)])
        return node

    def _mark(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        # A mark before a docstring would make a plain statement of it.
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            mark = ast.Constant(self._base + statement.lineno)
            call = ast.Call(ast.Name(_MARK, ast.Load()), [mark], [])
            yield ast.copy_location(ast.Expr(call), statement)
        yield statement


@cache
def _list_statements(path: str) -> list[tuple[int, int]]:
    """Return first line and last line of each statement inside of functions, in order."""
    found = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef):
            inner = (one for part in node.body for one in ast.walk(part))
            found += [
                (n.lineno, n.end_lineno or n.lineno) for n in inner if isinstance(n, ast.stmt)
            ]
    return sorted(set(found))


def find_statement(path: str, line: int) -> int:
    """Return the first line of the innermost statement at a line, 0 outside of functions."""
    statements = _list_statements(path)
    before = reversed(statements[: bisect_left(statements, (line + 1, 0))])
    return next((first for first, last in before if last >= line), 0)


class Recorder:
    """A plugin of pytest that notes the marks of each test."""

    def __init__(self) -> None:
        setattr(builtins, _MARK, _PASSED.add)
        self.covering = Covering()
        self._fixtures: dict[str, set[int]] = defaultdict(set)
        self._failed: set[str] = set()

    def pytest_collection_finish(self) -> None:
        """Everything is imported."""
        self.covering.imported = frozenset(_PASSED)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note a test."""
        _PASSED.clear()
        cpu, began = time.process_time(), time.monotonic()
        result = yield
        seconds = round(time.process_time() - cpu, 3), round(time.monotonic() - began, 3)
        self.covering.tests[item.nodeid] = CoveringTest(*seconds, frozenset(_PASSED))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Note what the fixtures pass."""
        result = yield
        self._fixtures[item.nodeid.partition("::")[0]] |= _PASSED
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure."""
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Leave out what failed; give each test the marks of its file's fixtures."""
        self.covering.failed = tuple(sorted(self._failed))
        for name, test in list(self.covering.tests.items()):
            del self.covering.tests[name]
            marks = test.marks | self._fixtures[name.partition("::")[0]]
            if name not in self._failed and marks:
                self.covering.tests[name] = CoveringTest(test.cpu, test.seconds, marks)


def digest_files(files: Sequence[str]) -> str:
    """Return a hash of sources."""
    parts = [f"{file}\n{(ROOT / file).read_text()}" for file in files]
    return sha256("\n".join(parts).encode()).hexdigest()


def write_covering(covering: Covering, file: Path) -> None:
    """Keep a covering for the next run, with the sources that it is about."""
    tests = {n: [t.cpu, t.seconds, sorted(t.marks)] for n, t in covering.tests.items()}
    files = {name: digest_files([name]) for name in sorted(covering.files)}
    raw: dict[str, Any] = {"core": digest_files(CORE), "files": files}
    raw |= {"imported": sorted(covering.imported), "failed": covering.failed, "tests": tests}
    file.write_text(json.dumps(raw))


def read_covering(file: Path) -> Covering:
    """Return what was kept about sources that are still the same."""
    raw: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if raw.get("core") != digest_files(CORE):
        return Covering()
    known = {n for n, d in raw["files"].items() if (ROOT / n).exists() and d == digest_files([n])}
    tests = {
        name: CoveringTest(cpu, seconds, frozenset(marks))
        for name, (cpu, seconds, marks) in raw["tests"].items()
        if name.partition("::")[0] in known
    }
    failed = tuple(name for name in raw["failed"] if name.partition("::")[0] in known)
    return Covering(tests, frozenset(raw["imported"]), failed, frozenset(known))
