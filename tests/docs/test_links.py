"""What the docs point to is there: pages, tests, targets of make.

Each promise names the test that fails when it is broken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.named_tests import ROOT, find_missing_tests

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES.remove(ROOT / "docs" / "renamed-files.md")  # It lists names that no longer exist.
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_TEST = re.compile(r"`((?:tests/[\w/]+\.py)?)(?:::(\w+))?`")
_TARGET = re.compile(r"`make ([a-z][a-z0-9-]*)")
_PROMISES = {"docs/guarantees.md": "| promise |", "docs/recovery.md": "| what "}
_TESTS_PAGE = ROOT / "docs" / "guarantees-tests.md"


def named_tests(text: str) -> Iterator[tuple[str, str]]:
    """(file, function) of each test that a text names.

    `::name` alone is of the file named before it.
    """
    file = ""
    for found in _TEST.finditer(text):
        file = found[1] or file
        if file and (found[1] or found[2]):
            yield file, found[2] or ""


def list_rows(page: Path, heading: str) -> dict[str, str]:
    """First cell and whole row, over all tables of a page that begin with a heading."""
    rows: dict[str, str] = {}
    inside = False
    for line in page.read_text().splitlines():
        inside = line.startswith("|") and (inside or line.startswith(heading))
        if inside and not line.startswith((heading, "|---")):
            rows[line.split("|")[1].strip()] = line
    return rows


@pytest.mark.skipif(not (ROOT / "src").exists(), reason="the folders of the packages are not here")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page is a file or folder of the project."""
    links = [
        link
        for link in _LINK.findall(page.read_text())
        if "://" not in link and not link.startswith("mailto:")
    ]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_tests_exist(page: Path) -> None:
    """Every test that a page names is in its file."""
    named = [f"{file}::{function}" for file, function in named_tests(page.read_text())]
    assert find_missing_tests(named) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_of_make_exist(page: Path) -> None:
    """Every `make` command of a page is a target."""
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(_TARGET.findall(page.read_text())) - targets == set()


@pytest.mark.parametrize("page", _PROMISES)
def test_every_promise_names_its_test(page: str) -> None:
    """A row has its tests under the same first cell; without one nothing checks the claim."""
    rows = list_rows(ROOT / page, _PROMISES[page])
    tests = list_rows(_TESTS_PAGE, _PROMISES[page])
    assert len(rows) > 5
    assert set(rows) == set(tests)
    assert [name for name, row in tests.items() if not [*named_tests(row)]] == []
