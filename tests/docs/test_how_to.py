"""The how-to pages, and the runner of `make team` that follows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.team import FURTHER, PAGES, QUESTIONS, Step, follow_page, is_output, read_steps

TUTORIAL = PAGES.parent / "tutorial.md"
HOW_TO = [TUTORIAL, *sorted(one for one in PAGES.glob("*.md") if one.name != "README.md")]
PAGE = """\
```yaml
# folder/a.yaml
a: 1
```

```yaml
b: not a file
```

```sh
cat folder/a.yaml
false
```

```text
a: ...
```
"""


def test_each_question_has_a_page() -> None:
    """A page that no question names would be followed by no run."""
    followed = [(PAGES / page).resolve() for page in (*QUESTIONS.values(), *FURTHER.values())]
    assert sorted(followed) == sorted(HOW_TO)


def test_the_index_lists_each_question_with_its_page() -> None:
    """In the words of the question."""
    index = (PAGES / "README.md").read_text("utf-8")
    assert [one for one in QUESTIONS if f"| {one} |" not in index] == []
    assert [page for page in QUESTIONS.values() if f"]({page})" not in index] == []


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_each_page_shows_what_its_commands_print(page: Path) -> None:
    """Without an output, following the page would only prove that commands end."""
    assert [step for step in read_steps(page.read_text("utf-8")) if step.output]


def test_steps_are_files_and_commands_with_their_output() -> None:
    """A block without a file's name is only read."""
    assert read_steps(PAGE) == [
        Step("folder/a.yaml", "a: 1\n"),
        Step("", "cat folder/a.yaml\nfalse\n", "a: ...\n"),
    ]


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a  b\n", "a b\n\n", True),
        ("a b", "a c", False),
        ("a ... d", "a b\nc\nd", True),
        ("...\nb\n...", "a\nb\nc", True),
        ("...\nb\n...", "a\nc", False),
        ("a.c", "abc", False),
        ("a", "a b", False),
    ],
)
def test_output_is_compared_but_for_spaces(expected: str, printed: str, same: bool) -> None:
    """Three dots are any text, on one line or more."""
    assert is_output(expected, printed) is same


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (PAGE, ""),
        (PAGE.replace("a: ...", "b: ..."), "with exit code 1:\na: 1\n"),
        ("```sh\nfalse\n```\n", "with exit code 1:\n"),
        ("```sh\ntrue\n```\n", ""),
    ],
)
def test_what_differs_is_named(tmp_path: Path, page: str, found: str) -> None:
    """Another output, or a command that fails where the page shows no output."""
    answer = follow_page(page, tmp_path, os.environ)
    assert answer.endswith(found)
    assert bool(answer) == bool(found)
