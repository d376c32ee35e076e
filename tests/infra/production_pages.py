"""The pages of docs/ that say how to run tidegate in production, read as one text."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_NAMES = (
    "production",
    "deployment",
    "security",
    "operations",
    "observability",
    "clusters",
    "output-tables",
    "source-objects",
    "source-tables",
    "kafka",
    "landing",
    "sinks",
)


def read_production_pages() -> str:
    """The text of all pages, one after another."""
    return "\n".join((DOCS / f"{name}.md").read_text() for name in _NAMES)


def list_code_blocks(language: str) -> list[str]:
    """The fenced blocks of one language on these pages, in their order."""
    return re.findall(rf"```{language}\n(.*?)```", read_production_pages(), re.DOTALL)
