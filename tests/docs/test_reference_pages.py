"""docs/options.md and docs/errors.md follow from the code and explain every field and code."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "src").exists(), reason="the folders of the packages are not here"
)


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """The generator of the pages, which is a script and not part of a package."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def list_table_rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of each table row that begins with a code span."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_reference_pages_are_current(generate: ModuleType) -> None:
    """`make docs` has been run since the models or the catalogues changed."""
    assert generate.write_pages(check=True) == []


def test_every_option_has_a_meaning(generate: ModuleType) -> None:
    """A field of the YAML file without an explanation cannot be used."""
    silent = [row[0] for row in list_table_rows(generate.render_options()) if not row[3]]
    assert silent == []


def test_every_scalar_option_has_an_example(generate: ModuleType) -> None:
    """Every field shows a value, unless it is a section of its own."""
    without = [
        row[0]
        for row in list_table_rows(generate.render_options())
        if not row[4] and "](#" not in row[1]
    ]
    assert without == []


def test_a_code_has_one_failure_class(generate: ModuleType) -> None:
    """The exit code of an error code does not depend on the place that raises it."""
    classes: dict[str, set[str]] = {}
    for _, entry in generate.list_catalogue():
        classes.setdefault(entry.code, set()).add(entry.error.failure_class.value)
    assert {code: kinds for code, kinds in classes.items() if len(kinds) > 1} == {}


def test_codes_stand_in_catalogues_only() -> None:
    """Outside the catalogues no call site spells out a code."""
    spelled = [
        f"{path.relative_to(ROOT)}: {found[1]}"
        for room in ("checkpoints", "expectations", "infra", "jobs", "operators")
        for path in sorted((ROOT / room).rglob("*.py"))
        if path.name != "errors.py"
        for found in re.finditer(r'code="([a-z_]+\.[a-z_]+)"', path.read_text())
    ]
    assert spelled == []
