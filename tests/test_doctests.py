"""The examples in docstrings, run without a change."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import tidegate

PACKAGE = Path(tidegate.__file__).parent


def _modules_with_examples() -> list[str]:
    # By text, not by import: collecting must not load Spark, Airflow and Great Expectations.
    files = (
        file
        for folder in PACKAGE.iterdir()
        if folder.is_dir()
        for file in folder.resolve().rglob("*.py")
    )
    found = [file for file in files if ">>> " in file.read_text(encoding="utf-8")]
    roots = {folder.resolve(): folder.name for folder in PACKAGE.iterdir()}
    names = []
    for file in found:
        root = next(root for root in roots if file.is_relative_to(root))
        parts = ("tidegate", roots[root], *file.relative_to(root).with_suffix("").parts)
        names.append(".".join(part for part in parts if part != "__init__"))
    return sorted(names)


@pytest.mark.parametrize("name", _modules_with_examples())
def test_examples(name: str) -> None:
    """What a docstring shows is what happens."""
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
