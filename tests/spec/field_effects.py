"""``python -m tests.spec.field_effects``: every field of a spec, who reads it, and who tests it.

A field that no code reads has no effect; it has to be left out of the models, or refused by
`tidegate.jobs.spec.ineffective_fields`.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from tests.named_tests import ROOT

from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.operations import QualityLimits
from tidegate.jobs.spec.pipeline import PipelineSpec

# Before the models read the file, the loader checks the version and puts the preset's values in.
_READ_BY_LOADER = {"api_version", "preset", "explicit"}
# Tests that go through all fields say nothing about one.
_ABOUT_ALL = ("tests/docs", "tests/spec/field_effects.py", "tests/spec/test_field_effects.py")
# One test goes through all limits, and looks for the check that each of them changes.
_LIMIT_TESTS = ("tests/spec/test_field_effects.py",)


@dataclass(frozen=True)
class FieldUse:
    """One field of a spec.

    Attributes:
        name: the model and the field, as in `docs/options.md`.
        readers: files with code that reads a field of this name, or a suite with a limit.
        tests: files with tests that name it as a spec does.
    """

    name: str
    readers: tuple[str, ...]
    tests: tuple[str, ...]


def list_fields() -> Iterator[FieldUse]:
    """Yield the fields of pipelines and jobs, model by model."""
    readers, tests = _index_readers(), _index_tests()
    for model in list_models():
        for name, field in model.model_fields.items():
            alias = field.alias or name
            found = ["jobs/spec/loader.py"] if name in _READ_BY_LOADER else readers[name]
            named = [*tests[alias], *(_LIMIT_TESTS if model is QualityLimits else ())]
            yield FieldUse(f"{model.__name__}.{alias}", tuple(found), tuple(named))


@cache
def list_models() -> tuple[type[BaseModel], ...]:
    """The models of pipelines and jobs, with all models below them."""
    found: list[type[BaseModel]] = []
    waiting: list[Any] = [PipelineSpec, JobSpec]
    while waiting:
        kind = waiting.pop(0)
        waiting += get_args(kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in found:
            found.append(kind)
            waiting += [field.annotation for field in kind.model_fields.values()]
    return tuple(found)


def _index_readers() -> defaultdict[str, list[str]]:
    code = [
        path
        for room in ("checkpoints", "jobs", "operators", "expectations")
        for path in _list(room, "py")
    ]
    index = _index(code, r"\.([a-z_][a-z0-9_]*)")
    limits = _index(_list("expectations/suites", "yaml"), r"limit: ([a-z0-9_]+)")
    # Summaries take the limits that suites do not name.
    limits_by_name = _index([ROOT / "expectations/summaries.py"], r"limits\[\"([a-z0-9_]+)\"\]")
    for more in (limits, limits_by_name):
        for name, files in more.items():
            index[name] += files
    return index


def _index_tests() -> defaultdict[str, list[str]]:
    files = (path for path in _list("tests", "py") if not _name(path).startswith(_ABOUT_ALL))
    return _index(files, r"[A-Za-z_][A-Za-z0-9_]*")


def _index(files: Any, pattern: str) -> defaultdict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in files:
        for name in sorted(set(re.findall(pattern, path.read_text("utf-8")))):
            found[name].append(_name(path))
    return found


def _list(folder: str, ending: str) -> list[Path]:
    return sorted((ROOT / folder).rglob(f"*.{ending}"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def main() -> None:
    """Print a line for each field."""
    fields = list(list_fields())
    for one in fields:
        reader, test = (next(iter(files), "nothing") for files in (one.readers, one.tests))
        sys.stdout.write(f"{one.name:40} read in {reader:45} tested in {test}\n")
    idle = sum(not (one.readers and one.tests) for one in fields)
    sys.stdout.write(f"{len(fields)} fields, {idle} without a reader or a test\n")


if __name__ == "__main__":
    main()
