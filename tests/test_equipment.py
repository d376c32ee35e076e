"""What tests share is in modules that hold no tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def list_imported_modules(text: str) -> Iterator[str]:
    """Dotted names that a module imports, as far as they may be modules; relative ones too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


def imports_tests(text: str) -> bool:
    """Whether a part of an imported name is a test module, or a test in it."""
    return any(
        part.startswith("test_") for name in list_imported_modules(text) for part in name.split(".")
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from tests.sinks.test_follow import once", True),
        ("from tests.sinks import test_follow", True),
        ("from .test_follow import once", True),
        ("import tests.sinks.test_follow as follow", True),
        ("def read():\n    from tests.sinks.test_follow import once", True),
        ("from tests.sinks.table_checks import once", False),
    ],
)
def test_every_form_of_import_is_seen(text: str, expected: bool) -> None:
    """Absolute, relative, and inside a function."""
    assert imports_tests(text) is expected


def test_no_test_imports_from_a_test_module() -> None:
    """Such an import couples two tests, and pytest collects what is imported a second time."""
    bad = [
        str(path.relative_to(TESTS))
        for path in sorted(TESTS.rglob("*.py"))
        if imports_tests(path.read_text("utf-8"))
    ]
    assert bad == []
