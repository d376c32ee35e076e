"""Mutants are real changes, drawn repeatably, and the run tells a killed from a surviving one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation import mutants, run
from tests.mutation.__main__ import read_answers
from tests.mutation.mutants import CORE, ROOT, draw_mutants

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


@needs_packages
def test_every_module_of_the_core_exists_and_has_tests() -> None:
    """A renamed module would silently be left out."""
    for path in CORE:
        assert (ROOT / path).is_file(), path
        assert run.choose_tests(path)


@needs_packages
def test_every_answer_is_about_a_line_that_exists() -> None:
    """An answer for code that has changed would hide nothing, and mislead."""
    for (path, before, _), reason in read_answers().items():
        assert reason
        assert before in {line.strip() for line in (ROOT / path).read_text().splitlines()}, before
