"""The reference pages follow from code and rules, and explain every field, code and alert."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter
from ruamel.yaml import YAML

from tidegate.checkpoints.incidents import INCIDENT_KINDS
from tidegate.jobs.spec.pipeline import PipelineSpec

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


def list_models(root: Any) -> set[type[BaseModel]]:
    """The models that a type is made of."""
    found: set[type[BaseModel]] = set()
    waiting = [root]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in found:
            found.add(kind)
            waiting += [field.annotation for field in kind.model_fields.values()]
        waiting += get_args(kind)
    return found


def list_table_rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of each table row that begins with a code span."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_each_alert_has_its_severity_text_and_advice(generate: ModuleType) -> None:
    """Of incidents and of Prometheus' rules; none of Prometheus' own templates is left in it."""
    rules = YAML(typ="safe").load(ROOT / "infra" / "deploy" / "alerts.yaml")["groups"][0]["rules"]
    page = generate.render_alerts()
    rows = list(list_table_rows(page))
    kinds = {name: kind["severity"] for name, kind in INCIDENT_KINDS.items()}
    kinds |= {rule["alert"]: rule["labels"]["severity"] for rule in rules}
    assert [(row[0], row[2]) for row in rows] == [(f"`{name}`", kinds[name]) for name in kinds]
    assert all(len(row) == 7 and all(row) for row in rows)
    assert "{{" not in page


def test_reference_pages_are_current(generate: ModuleType) -> None:
    """`make docs` has been run since the models or the catalogues changed."""
    assert generate.write_pages(check=True) == []


def test_every_option_has_a_meaning(generate: ModuleType) -> None:
    """A field of the YAML file without an explanation cannot be used."""
    silent = [row[0] for row in list_table_rows(generate.render_options()) if not row[3]]
    assert silent == []


def test_durations_are_written_as_in_a_spec(generate: ModuleType) -> None:
    """A default in ticks could not be copied into a spec."""
    rows = list(list_table_rows(generate.render_options()))
    assert {row[2] for row in rows if row[0] in ("`idle_timeout`", "`stall_after`")} == {
        "`1m`",
        "`2m`",
    }
    numbers = [
        row for row in rows if row[1] in ("text", "duration") and row[2].strip("`").isdigit()
    ]
    assert [row[0] for row in numbers if row[2] != "`0`"] == []


def test_every_scalar_option_has_an_example(generate: ModuleType) -> None:
    """Every field shows a value, unless it is a section of its own."""
    without = [
        row[0]
        for row in list_table_rows(generate.render_options())
        if not row[4] and "](#" not in row[1]
    ]
    assert without == []


def test_every_example_is_valid(generate: ModuleType) -> None:
    """An example of docs/option_examples.yaml is accepted by its field."""
    models = {model.__name__: model for model in list_models(PipelineSpec)}
    for name, examples in generate._load_examples().items():
        fields = {field.alias or key: field for key, field in models[name].model_fields.items()}
        for key, value in examples.items():
            kind: Any = Annotated[fields[key].annotation, None, *fields[key].metadata]
            TypeAdapter(kind).validate_python(value, context={"yaml": True})


def test_a_code_has_one_failure_class(generate: ModuleType) -> None:
    """The exit code of an error code does not depend on the place that raises it."""
    # A damaged object is tried again a few times before it is poison; a checkpoint that cannot be
    # restored is either not finished yet or never will be.
    both = {"object.corrupt", "recover.unfit"}
    classes: dict[str, set[str]] = {}
    for _, entry in generate.list_catalogue():
        classes.setdefault(entry.code, set()).add(entry.error.failure_class.value)
    assert {code for code, kinds in classes.items() if len(kinds) > 1} <= both


def test_every_error_of_a_catalogue_is_raised() -> None:
    """Code names each entry outside its catalogue, because a text that no one sees is dead."""
    rooms = ("checkpoints", "expectations", "infra", "jobs", "operators")
    code = "\n".join(p.read_text("utf-8") for r in rooms for p in (ROOT / r).rglob("*.py"))
    entries = [
        n
        for r in rooms
        for p in (ROOT / r).rglob("errors.toml")
        for n in tomllib.loads(p.read_text("utf-8"))
    ]
    assert len(entries) > 200
    assert [name for name in entries if not re.search(rf"\b{name}\b", code)] == []
