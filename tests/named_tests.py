"""Finds tests that a text or an index names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def find_missing_tests(names: Iterable[str]) -> list[str]:
    """Return the names that are no test.

    Args:
        names: path of a test file from the root, then ``::`` and the function without parameters;
            a path without a function names the file.
    """
    return [name for name in names if not _is_test(name)]


def _is_test(name: str) -> bool:
    file, _, function = name.partition("::")
    path = ROOT / file
    if not path.is_file():
        return False
    return not function or bool(
        re.search(rf"^def {re.escape(function)}\(", path.read_text("utf-8"), re.MULTILINE)
    )
