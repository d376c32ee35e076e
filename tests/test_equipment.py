"""What tests share is in modules that hold no tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scheduling import AIRFLOW_FILES, SLOWEST_FILES, name_scope

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


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("tests/spark/test_read.py::a", "tests/spark/test_frame_tasks.py::b", True),
        ("tests/e2e/test_kills.py::a", "tests/e2e/test_kills.py::b", True),
        ("tests/operators/test_airflow.py::a", "tests/operators/test_airflow.py::b", True),
        ("tests/e2e/test_kills.py::a", "tests/e2e/test_bad_input.py::b", False),
        ("tests/spec/test_layout.py::a", "tests/spec/test_layout.py::b", False),
    ],
)
def test_tests_that_share_what_is_dear_stay_together(one: str, other: str, together: bool) -> None:
    """Spark's session, fixtures of a module and Airflow are made once, not once per worker."""
    assert (name_scope(one, by_files=False) == name_scope(other, by_files=False)) is together


def test_by_files_only_one_worker_starts_airflow() -> None:
    """Every file that starts an Airflow is in one group, and the lists name files that exist."""
    assert {name_scope(f"{file}::a", by_files=True) for file in AIRFLOW_FILES} == {"airflow"}
    listed = [*sorted(AIRFLOW_FILES), *SLOWEST_FILES]
    assert [file for file in listed if not (TESTS.parent / file).is_file()] == []
