"""Mutants are real changes, drawn repeatably, and the run tells a killed from a surviving one."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.mutation import mutants, run
from tests.mutation.__main__ import read_answers
from tests.mutation.covering import Covering, CoveringTest, find_statement, mark_tree
from tests.mutation.mutants import CORE, ROOT, draw_mutants
from tests.mutation.run import list_tests
from tests.mutation.session import find_changed_code, find_changes, list_functions

needs_packages = pytest.mark.skipif(
    not (ROOT / "src").exists(), reason="the folders of the packages are not here"
)
SOURCE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Box:
    size: int | None = None

def fill(box: Box | None, log) -> int:
    log.check(box)
    return 1 + 2
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small module in a project of its own."""
    (tmp_path / "module.py").write_text(SOURCE)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    mutants._read.cache_clear()
    return "module.py"


def test_each_mutant_changes_what_python_sees(module: str) -> None:
    """One line differs, the source compiles, and no annotation or decorator is touched."""
    drawn = draw_mutants(100, 0, (module,))
    assert drawn
    for mutant in drawn:
        assert ast.dump(ast.parse(mutant.read_source())) != ast.dump(ast.parse(SOURCE))
        assert mutant.before in ("log.check(box)", "return 1 + 2")


def test_a_call_can_be_left_out(module: str) -> None:
    """A check whose result no one uses is replaced by `pass`."""
    drawn = [m for seed in range(5) for m in draw_mutants(100, seed, (module,))]
    assert "pass" in {mutant.after for mutant in drawn if mutant.before == "log.check(box)"}


def test_the_same_seed_draws_the_same_mutants(module: str) -> None:
    """And another seed draws in another order."""
    first = draw_mutants(100, 1, (module,))
    assert first == draw_mutants(100, 1, (module,))
    assert len({mutant.key for mutant in first}) == len(first)


def test_a_change_of_one_module_draws_the_same_from_another(module: str, tmp_path: Path) -> None:
    """Results of a long run stay those of the draw while one module is repaired."""
    (tmp_path / "other.py").write_text("def add(n):\n    return n + 1\n")
    before = {m for m in draw_mutants(100, 1, (module, "other.py")) if m.path == module}
    (tmp_path / "other.py").write_text("def add(n, m):\n    m.check(n)\n    return n + 1 + 2\n")
    mutants._read.cache_clear()
    assert {m for m in draw_mutants(100, 1, (module, "other.py")) if m.path == module} == before


@needs_packages
def test_every_module_of_the_core_exists_and_has_tests() -> None:
    """A renamed module or folder of tests would silently be left out."""
    for path in CORE:
        assert (ROOT / path).is_file(), path
    rooms = {file.split("/")[1] for file in list_tests()}
    assert rooms == {*run.ROOMS}


@needs_packages
def test_every_answer_is_about_a_line_that_exists() -> None:
    """An answer for code that has changed would hide nothing, and mislead."""
    for (path, before, _), reason in read_answers().items():
        assert reason
        assert before in {line.strip() for line in (ROOT / path).read_text().splitlines()}, before


def test_every_statement_of_a_function_passes_its_mark() -> None:
    """Branches that are not taken pass none, and what is outside of functions has none."""
    source = 'LIMIT = 3\n\n\ndef pick(n):\n    "Say."\n    if n:\n        return 1\n    return 2\n'
    tree = mark_tree(ast.parse(source), base=0)
    passed: list[int] = []
    space: dict[str, Any] = {"__passed__": passed.append}
    exec(compile(tree, "module", "exec"), space)
    assert passed == []
    assert space["pick"](0) == 2
    assert passed == [6, 8]
    assert space["pick"].__doc__ == "Say."


@needs_packages
def test_tests_are_chosen_by_the_line_and_the_quickest_comes_first() -> None:
    """A line outside of functions is executed by every test that the module has."""
    path = CORE[0]
    statement = max(line for line in range(200) if find_statement(path, line) == line)
    tests = {
        "slow": CoveringTest(1.0, 9.0, frozenset({statement})),
        "quick": CoveringTest(1.0, 1.0, frozenset({statement})),
        "other": CoveringTest(1.0, 1.0, frozenset({statement + 1})),
        "foreign": CoveringTest(1.0, 1.0, frozenset({100_000 + statement})),
    }
    covering = Covering(tests)
    assert covering.choose_tests(path, statement) == ["quick", "slow"]
    assert covering.choose_tests(path, 1) == ["other", "quick", "slow"]


def _compile(source: str) -> CodeType:
    return compile(source, "module", "exec", dont_inherit=True)


def test_only_the_function_that_changed_is_replaced() -> None:
    """Other line numbers are no change; a default and a constant of the module are more than one."""
    old = (
        "A = 1\n\nclass C:\n    def f(self, a=1):\n        return [x + 1 for x in a]\n\n    g = 2\n"
    )
    changed = find_changed_code(_compile(old), _compile("\n" + old.replace("x + 1", "x - 1")))
    assert changed is not None
    assert [(before.co_qualname, after.co_qualname) for before, after in changed] == [
        ("C.f", "C.f")
    ]
    for other in ("a=1", "A = 1", "g = 2"):
        assert (
            find_changed_code(_compile(old), _compile(old.replace(other, other[:-1] + "7"))) is None
        )


@needs_packages
def test_a_changed_function_is_found_in_memory() -> None:
    """A method of the core gets the code of the mutant."""
    path = "checkpoints/lease.py"
    importlib.import_module("tidegate.checkpoints.lease")
    source = (ROOT / path).read_text()
    body = "self._store, self._clock = store, clock"
    assert source.count(body) == 1
    changes = find_changes(path, source.replace(body, "pass"), list_functions())
    assert changes is not None
    assert {function.__qualname__ for function, _ in changes} == {"Lease.__init__"}
    assert find_changes(path, source + "\nEXTRA = 1\n", list_functions()) is None


class _LazyProxy:
    """Imports a module that is not there as soon as its class is asked for."""

    @property
    def __class__(self) -> type:
        raise ModuleNotFoundError("cloudpickle")

    @__class__.setter
    def __class__(self, value: type) -> None: ...


def test_what_other_libraries_keep_in_memory_is_left_alone() -> None:
    """Airflow's operators have such proxies, and tests of them may have run before."""
    proxy = _LazyProxy()
    assert all(functions for functions in list_functions().values())
    with pytest.raises(ModuleNotFoundError):
        isinstance(proxy, FunctionType)


@needs_packages
def test_a_mutant_of_which_python_warns_is_judged() -> None:
    """`is not "error"` is a SyntaxWarning, which is an error in tests; it ended the session."""
    path = "jobs/eventtime/members.py"
    importlib.import_module("tidegate.jobs.eventtime.members")
    source = (ROOT / path).read_text()
    assert source.count('== "error"') == 1
    assert find_changes(path, source.replace('== "error"', 'is not "error"'), list_functions())
