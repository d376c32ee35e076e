"""What the pages about sources, outputs and production show is what the code takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from tests.infra.deploy import DEPLOY

from tidegate.infra.policies import Role
from tidegate.jobs.spec.operations import OutputSpec, SparkSpec
from tidegate.jobs.spec.pipeline import SourceSpec

NAMES = (
    "deployment clusters security observability operations"
    " source-objects kafka source-tables landing output-tables"
)
TEXT = "\n".join(
    (Path(__file__).parents[2] / "docs" / f"{name}.md").read_text() for name in NAMES.split()
)
BLOCKS = [
    YAML(typ="safe").load(block) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
]
SOURCES = [(name, raw) for block in BLOCKS for name, raw in block.get("sources", {}).items()]


@pytest.mark.parametrize(("name", "raw"), SOURCES, ids=[name for name, _ in SOURCES])
def test_sources_are_valid(name: str, raw: dict[str, object]) -> None:
    """Each source of the page can be put into a spec without a change."""
    assert SourceSpec.model_validate(raw).event_time == "at"


@pytest.mark.parametrize("raw", [block["outputs"] for block in BLOCKS if "outputs" in block])
def test_outputs_are_valid(raw: dict[str, object]) -> None:
    """So can each section on outputs."""
    assert OutputSpec.model_validate(raw) != OutputSpec()


@pytest.mark.parametrize("raw", [block["spark"] for block in BLOCKS if "spark" in block])
def test_clusters_are_valid(raw: dict[str, object]) -> None:
    """So can the section on Spark."""
    assert SparkSpec.model_validate(raw).conf


def test_files_and_roles_exist() -> None:
    """Files that the page names are there, variables it names are those of the compose file, roles
    are those of the program.
    """
    root = DEPLOY.parents[1]
    for path in re.findall(r"`(infra/deploy/[\w/.]+)`", TEXT):
        assert (root / path).exists(), path
    compose = (DEPLOY / "compose" / "compose.yaml").read_text()
    required = set(re.findall(r"\$\{(\w+):\?", compose))
    assert required <= set(re.findall(r"`([A-Z_0-9]+)`", TEXT))
    assert set(re.findall(r"infra\.policies (\w+)", TEXT)) == {role.value for role in Role}
