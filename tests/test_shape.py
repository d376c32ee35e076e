"""The measurement behind `make shape`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.shape import GOALS, Shape, judge_goals, main, measure_files, measure_text, select_product

MODULE = '''"""What it is for."""

# Why it is so.
LIMIT = 1  # bytes


def read_rows(a, b, c, d, e, f, g):
    """Read."""
    found = 1  # noqa: F841
    late_rows = 2
    return late_rows


def run():
    return None


class Lease:
    """A lease."""

    def renew(self):
        return None
'''


def test_a_module_is_counted() -> None:
    """Comments to tools are no comments; a method's one word is not a free function's."""
    shape = measure_text(MODULE)
    assert shape.module_lines == [22]
    assert shape.function_lines == [5, 2, 2]
    counts = {
        "comments": 2, "doc": 3, "public": 4, "public_doc": 2, "functions": 3, "one_word": 2,
        "free": 2, "free_one_word": 1, "locals": 2, "one_word_locals": 1, "many_parameters": 1,
    }  # fmt: skip
    assert {name: shape.counts[name] for name in counts} == counts


def test_line_breaks_and_comments_change_no_tokens() -> None:
    """The size of the product does not depend on the line width."""
    long = measure_text("value = call(one, two)\n")
    wrapped = measure_text("value = call(\n    one,  # first\n    two\n)\n")
    assert long.counts["tokens"] == wrapped.counts["tokens"] == 8


def test_goals_are_judged_by_name() -> None:
    """A missed goal is printed by name, and the last line counts the goals that are met."""
    lines, all_met = judge_goals(Shape())
    missed = [line for line in lines if line.startswith("missed")]
    assert [line.split(":")[0] for line in missed] == [
        "missed public docstrings",
        "missed lines with a comment",
    ]
    assert lines[-1] == "shape: 5 of 7 goals"
    assert not all_met
    assert len(GOALS) == 7


@pytest.mark.parametrize(("comment", "code"), [("# Why it is so.\n", 0), ("", 1)])
def test_the_exit_code_says_whether_all_goals_are_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], comment: str, code: int
) -> None:
    """Only tracked files count, and a product that misses one goal makes the command fail."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "reader.py").write_text(
        comment + 'def read_rows():\n    """Read."""\n    return None\n'
    )
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "jobs"], cwd=tmp_path, check=True)
    (tmp_path / "jobs" / "untracked.py").write_text("def run(): ...\n")
    assert main([str(tmp_path)]) == code
    assert capsys.readouterr().out.endswith(f"shape: {7 - code} of 7 goals\n")


def test_tests_and_documents_are_not_the_product(tmp_path: Path) -> None:
    """They are measured, but the goals are about what is shipped."""
    for folder in ("tests", "docs", "operators"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text("LIMIT = 1\n")
    names = [f"{folder}/module.py" for folder in ("tests", "docs", "operators")]
    folders = measure_files(tmp_path, names)
    assert set(folders) == {"tests", "docs", "operators"}
    assert select_product(folders).module_lines == [1]
