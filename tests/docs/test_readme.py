"""What someone who has only the README needs is in it: steps that work, words, limits, numbers."""

from __future__ import annotations

import re
import shlex

import pytest
import typer
from typer.core import TyperGroup

from tests.named_tests import ROOT
from tidegate.jobs.cli.main import app

TEXT = (ROOT / "README.md").read_text("utf-8")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
COMMANDS = sorted(set(re.findall(r"^(tidegate [^#\n]+)", TEXT, re.MULTILINE)))
# Words of README and `tidegate status` that nobody knows from elsewhere, or by another name.
WORDS = [
    "frontier", "lag", "lateness", "epoch", "slot", "seal", "segment", "lease", "barrier",
    "coalesced frontier", "dead letter", "order buffer", "release", "publish", "timeline", "pipe",
    "reducer", "edge event", "preset", "mover", "decision", "pin", "holder", "unpublished",
]  # fmt: skip


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist(line: str) -> None:
    """Each command and each of its options is one that the command line has."""
    words = shlex.split(line)[1:]
    command = typer.main.get_command(app)
    while isinstance(command, TyperGroup):
        name = words.pop(0)
        assert name in command.commands, line
        command = command.commands[name]
    known = {option for one in command.params for option in one.opts}
    assert {word for word in words if word.startswith("--")} <= known, line


@pytest.mark.parametrize("word", WORDS)
def test_words_are_explained(word: str) -> None:
    """In the glossary, which the README links, with the words of other systems beside it."""
    terms = re.findall(r"^\| ([^|]+?) \|", GLOSSARY, re.MULTILINE)
    known = {re.sub(r" \(.*\)", "", term) for one in terms for term in one.split(", ")}
    assert word in known
    assert "(docs/glossary.md)" in TEXT


def test_a_reader_can_tell_whether_it_is_for_them() -> None:
    """Limits, the comparison with other engines, and a throughput with its measurement."""
    section = SECTIONS["Is it for you?"]
    assert "It is **not** for you if" in section
    assert "joins" in section
    assert {"docs/which-one.md", "docs/benchmarks.md"} <= set(re.findall(r"\]\(([^)#]+)", section))
    assert "million rows" in section
    assert "the watermark of Flink and Spark" in TEXT


def test_the_first_pipeline_needs_no_other_page() -> None:
    """How the command is found, where the store is, how files get there, and how the input ends."""
    section = SECTIONS["A pipeline of your own"]
    assert section.index("source .venv/bin/activate") < section.index("tidegate init")
    assert "tidegate run orders --until-end" in section
    assert "tidegate put orders" in section
    assert ".tidegate/store" in section
    assert "CSV, JSON lines, Parquet, Avro or ORC" in section


def test_the_readme_is_short() -> None:
    """At most 1,200 words, code included: what is longer has a page of its own."""
    words = [word for word in TEXT.split() if re.search(r"\w", word)]
    assert len(words) <= 1200
