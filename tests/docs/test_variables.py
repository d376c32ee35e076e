"""The page of environment variables has those that the code reads."""

from __future__ import annotations

import re
from pathlib import Path

import tidegate
from tests.named_tests import ROOT

_PAGE = ROOT / "docs" / "variables.md"
_ROOMS = ("checkpoints", "expectations", "infra", "jobs", "operators")
_VARIABLE = re.compile(
    r"""["'$]((?:TIDEGATE|OTEL|OPENLINEAGE|SPARK|PYSPARK|MINIO_ROOT)_[A-Z0-9_]*[A-Z0-9]"""
    r"""|AWS_[A-Z0-9_]+[A-Z0-9]|JAVA_HOME|MALLOC_ARENA_MAX|XDG_CACHE_HOME)(?=["'\s,.`}\]])"""
)
# Set by Spark for its own processes, and sent to boto3's own variables by tests alone.
_OF_SPARK = {"PYSPARK_GATEWAY_PORT"}


def list_modules() -> list[Path]:
    """The modules of the product, in a checkout and in an installed wheel."""
    package = Path(tidegate.__file__).parent
    return [file for room in _ROOMS for file in (package / room).resolve().rglob("*.py")]


def test_each_variable_that_the_code_names_is_on_the_page() -> None:
    """A variable that no page names is found by chance."""
    page = _PAGE.read_text("utf-8")
    named = {name for file in list_modules() for name in _VARIABLE.findall(file.read_text("utf-8"))}
    assert {"TIDEGATE_STORE", "OPENLINEAGE_URL", "JAVA_HOME"} <= named
    assert sorted(name for name in named - _OF_SPARK if name not in page) == []


def test_each_variable_of_the_page_is_one_of_the_code() -> None:
    """A variable that has gone would be set in vain."""
    code = "".join(file.read_text("utf-8") for file in list_modules())
    ours = set(re.findall(r"`(TIDEGATE_[A-Z0-9_]*[A-Z0-9])", _PAGE.read_text("utf-8")))
    parts = {
        f"TIDEGATE_EXECUTOR_S3_{key}"
        for key in ("ACCESS_KEY", "SECRET_KEY", "SESSION_TOKEN", "PROFILE")
    }
    assert sorted(name for name in ours - parts if name not in code) == []
