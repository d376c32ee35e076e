"""Every citation in code, tests and documents names a file and a heading that exist."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "src").exists(), reason="the folders of the packages are not here"
)

_FOLDERS = "checkpoints|dags|docs|expectations|infra|jobs|operators|tests"
_PATH = re.compile(rf"(?<![\w/.:{{}}*-])((?:{_FOLDERS})/[\w/.-]*\.(?:py|md|yaml|json|sh|js|css))\b")
_SECTION = re.compile(r"([\w-]+\.md),? sections? (\d+(?:\.\d+)?)(?: (?:and|to) (\d+(?:\.\d+)?))?")
_QUOTED = re.compile(r"docs/([\w-]+\.md), \"([^\"\n]+)\"")
_DECISION = re.compile(r"\bdecisions? (\d{1,4})\b")
_OLD_PAGES = re.compile(r"(?<![\w/])(?:design|facts|style|vectors)\.md\b")


@cache
def list_texts() -> tuple[tuple[str, str], ...]:
    """(name, text with line breaks joined) of every text file that git tracks."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return tuple(_read_texts(names))


def _read_texts(names: list[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".js", ".sh"} and path.is_file():
            if path.is_symlink() or name == "tests/docs/test_citations.py":
                continue
            # A citation may be broken over two lines of a docstring or a comment.
            yield name, re.sub(r"\s*\n\s*(?:# )?", " ", path.read_text(encoding="utf-8"))


@cache
def list_headings(page: str) -> frozenset[str]:
    """The headings of a document, without their marks."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return frozenset(re.findall(r"^#+ (.*)$", text, re.MULTILINE))


def test_cited_files_exist() -> None:
    """A path in a text is a file of the project."""
    missing = [
        f"{name}: {path}"
        for name, text in list_texts()
        if not name.startswith(("CHANGELOG", "docs/renamed-files"))
        for path in _PATH.findall(text)
        if not (ROOT / path).exists()
    ]
    assert missing == []


def test_cited_sections_exist() -> None:
    """``semantics.md, section 4.3`` is a heading of that page."""
    missing = []
    for name, text in list_texts():
        for page, *numbers in _SECTION.findall(text):
            if not (ROOT / "docs" / page).exists():
                missing.append(f"{name}: {page}")
                continue
            starts = {heading.split()[0].rstrip(".") for heading in list_headings(page)}
            missing += [f"{name}: {page} {n}" for n in numbers if n and n not in starts]
    assert missing == []


def test_cited_headings_exist() -> None:
    """``docs/semantics.md, "Release modes"`` is a heading of that page."""
    missing = [
        f"{name}: {page} {heading}"
        for name, text in list_texts()
        for page, heading in _QUOTED.findall(text)
        if heading not in list_headings(page)
    ]
    assert missing == []


def test_cited_decisions_exist() -> None:
    """A decision's number has a record."""
    numbers = {path.name[:4] for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md")}
    missing = [
        f"{name}: decision {number}"
        for name, text in list_texts()
        for number in _DECISION.findall(text)
        if number.zfill(4) not in numbers
    ]
    assert missing == []


def test_names_of_code_in_the_contributing_guide_exist() -> None:
    """A private function or a constant that it names, with a file before it or not, is in the code."""
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(_[a-z]\w+|_?[A-Z][A-Z_]{3,}|[A-Z]\w+[a-z]\w*)`", guide))
    code = "\n".join(text for name, text in list_texts() if name.endswith(".py"))
    missing = [name for name in sorted(named) if not re.search(rf"\b{name}\b", code)]
    assert missing == []
    assert len(named) > 20


def test_no_text_cites_documents_outside_the_repository() -> None:
    """The design papers that the project began with are not part of it."""
    assert [name for name, text in list_texts() if _OLD_PAGES.search(text)] == []
