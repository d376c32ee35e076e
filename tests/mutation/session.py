"""A session of pytest that has collected the tests and forks for each mutant.

Most mutants change functions only. The fork puts the changed code into the functions that the tests
have imported, so that nothing is imported or collected again. A mutant that changes what runs while
its module is imported needs a session of its own, which imports the changed source.
"""

from __future__ import annotations

import ast
import gc
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from tempfile import mkdtemp
from types import CodeType, FunctionType
from typing import Any

import psutil
import pytest

from tests.mutation.mutants import ROOT

OPTIONS = ("-q", "-n0", "-p", "no:cacheprovider", "-m", "unit and not slow", "--tb=no")
_BUSY = 10  # times the limit, by the clock on the wall: a mutant that waits for ever
FORK = get_context("fork")
Change = tuple[FunctionType, CodeType]


@dataclass(frozen=True)
class Verdict:
    """What came of a mutant: killed by a test, survived, timeout, or import.

    The last one means that the mutant changes more than functions.
    """

    what: str
    test: str = ""


def find_changed_code(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """Return the functions that differ, None if other code does.

    Functions inside of functions belong to the outermost one.
    """
    if _without_functions(old) != _without_functions(new):
        return None
    found = []
    for one, other in zip(_codes(old), _codes(new), strict=True):
        if not one.co_flags & _IS_FUNCTION:
            below = find_changed_code(one, other)
            if below is None:
                return None
            found += below
        elif _whole(one) != _whole(other):
            found.append((one, other))
    return found


_IS_FUNCTION = 0x2  # CO_NEWLOCALS: set for functions, not for modules and bodies of classes


def _codes(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _without_functions(code: CodeType) -> tuple[Any, ...]:
    """What a code does, without line numbers; the codes below it are left out."""
    # Since Python 3.13 the body of a class stores its first line and a tuple of its attributes.
    is_described = "__static_attributes__" in code.co_names
    kept = [
        one
        for one in code.co_consts
        if not (is_described and (one == code.co_firstlineno or _is_tuple_of_names(one)))
    ]
    constants = [repr(c) if not isinstance(c, CodeType) else c.co_qualname for c in kept]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return code.co_code, code.co_exceptiontable, code.co_flags, *names, *constants


def _is_tuple_of_names(constant: object) -> bool:
    return isinstance(constant, tuple) and all(isinstance(name, str) for name in constant)


def _whole(code: CodeType) -> tuple[Any, ...]:
    return _without_functions(code), *map(_whole, _codes(code))


Place = tuple[str, int, str]  # file, line and name of a function's code


def list_functions() -> dict[Place, list[FunctionType]]:
    """Return the product's functions in memory by the place of their code."""
    found = defaultdict[Place, list[FunctionType]](list)
    gc.unfreeze()  # tests/conftest.py freezes what was collected
    for function in gc.get_objects():
        # Not isinstance, which asks `__class__`: for that a lazy proxy of Airflow imports its module.
        if type(function) is FunctionType and f"{function.__module__}".startswith("tidegate."):
            found[_place(function.__code__)].append(function)
    return found


def _place(code: CodeType) -> Place:
    return code.co_filename, code.co_firstlineno, code.co_qualname


class Session:
    """A process that has collected the tests of some files."""

    def __init__(self, files: Sequence[str]) -> None:
        self._connection, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_collect, args=(files, theirs))
        self._process.start()
        theirs.close()

    def run(self, path: str, source: str, tests: Sequence[str], limit: float) -> Verdict:
        """Run tests with another source of a module, until one fails.

        A test that then fails without the mutant as well, on a busy machine, kills nothing.
        """
        self._connection.send((path, source, list(tests), limit))
        found: Verdict = self._connection.recv()
        return found

    def close(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join()


def _collect(files: Sequence[str], connection: Connection) -> None:
    silence()
    run_pytest(files, _Server(connection))
    os._exit(0)


def silence() -> None:
    """Let this process print nothing."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)


def run_pytest(files: Sequence[str], plugin: object) -> int:
    """Run pytest in this process with a plugin; return its exit code."""
    scratch = f"--basetemp={mkdtemp(prefix='mutation-')}"
    return int(pytest.main([*OPTIONS, "--capture=sys", scratch, *files], plugins=[plugin]))


class _Server:
    """Serves instead of running the tests."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Answer until None is asked."""
        items = {item.nodeid: item for item in session.items}
        functions = list_functions()
        gc.freeze()  # forks then share the memory of what was collected
        while (asked := self._connection.recv()) is not None:
            path, source, tests, limit = asked
            changes = find_changes(path, source, functions)
            if changes is None:
                self._connection.send(Verdict("import"))
                continue
            chosen = [items[name] for name in tests if name in items]
            self._connection.send(self._judge(session, changes, chosen, limit))
        return True

    def _judge(
        self, session: pytest.Session, changes: list[Change], items: list[pytest.Item], limit: float
    ) -> Verdict:
        found = Verdict("survived")
        while items:
            found = run_fork(partial(run_items, session, items, changes), limit)
            names = [item.nodeid for item in items]
            if found.test not in names:
                break
            at = names.index(found.test)
            again = run_fork(partial(run_items, session, [items[at]], []), limit)
            if again.what == "survived":
                break
            items, found = items[at + 1 :], Verdict("survived")
        return found


def compile_source(source: str | ast.Module, file: str) -> CodeType:
    """Compile a module; what Python warns of, such as `is` before a literal, is the mutant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        code: CodeType = compile(source, file, "exec", dont_inherit=True)
    return code


def find_changes(
    path: str, source: str, functions: Mapping[Place, list[FunctionType]]
) -> list[Change] | None:
    """Return each function to change with its new code, None if that is not enough."""
    module = sys.modules.get("tidegate." + path.removesuffix(".py").replace("/", "."))
    file = (module and module.__file__) or path
    original = (ROOT / path).read_text()
    old, new = (compile_source(text, file) for text in (original, source))
    changed = find_changed_code(old, new)
    if changed is None or not all(_place(before) in functions for before, _ in changed):
        return None
    found = [(f, code) for before, code in changed for f in functions[_place(before)]]
    fits = all(f.__code__.co_freevars == code.co_freevars for f, code in found)
    return found if fits else None


def run_items(session: pytest.Session, items: Sequence[pytest.Item], changes: list[Change]) -> str:
    """Run collected tests in this process; return the first that fails, or nothing."""
    for function, code in changes:
        function.__code__ = code
    following = [*items[1:], None]
    for item, after in zip(items, following, strict=True):
        try:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        except BaseException:  # a mutant may raise anything
            return item.nodeid
        if session.testsfailed:
            return item.nodeid
    return ""


def run_fork(work: Callable[[], str], limit: float) -> Verdict:
    """Run something in a fork that ends with it, or after the limit in processor seconds.

    Returns:
        The verdict for the test whose name the fork returns.
    """
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_send_result, args=(work, theirs))
    process.start()
    theirs.close()
    began = time.monotonic()
    while not ours.poll(0.1) and not _is_over(process.pid or 0, limit, began):
        pass
    try:
        test = ours.recv() if ours.poll() else None
        found = (
            Verdict("timeout") if test is None else Verdict("killed" if test else "survived", test)
        )
    except EOFError:  # the mutant ended the process
        found = Verdict("killed", "the end of the process")
    process.kill()
    process.join()
    ours.close()
    return found


def _send_result(work: Callable[[], str], connection: Connection) -> None:
    os.setpgid(0, 0)
    connection.send(work())
    # A mutant that leaves a thread behind must not keep the process alive.
    os._exit(0)


def _is_over(pid: int, limit: float, began: float) -> bool:
    """Whether a mutant hangs: by processor seconds, because the machine may be busy."""
    try:
        spent = sum(psutil.Process(pid).cpu_times()[:4])
    except psutil.NoSuchProcess:
        return False
    return spent > limit or time.monotonic() - began > _BUSY * limit
