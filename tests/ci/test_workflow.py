"""The workflow with which a public forge runs CI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

WORKFLOW = Path(__file__).parents[2] / ".github/workflows/ci.yaml"


def read_jobs() -> dict[str, Any]:
    """The jobs of the workflow."""
    return dict(YAML(typ="safe").load(WORKFLOW)["jobs"])


def list_commands(job: dict[str, Any]) -> list[str]:
    """What the steps of a job run."""
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_keeps_its_schema() -> None:
    """The file is what the forge accepts, by the schema that check-jsonschema brings."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    command += ["vendor.github-workflows", str(WORKFLOW)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflow_runs_the_whole_of_ci_and_checks_the_package() -> None:
    """CI is one script, whoever starts it, and has more than its 90 minutes."""
    jobs = read_jobs()
    assert list_commands(jobs["ci"]) == [".ci/run"]
    assert jobs["ci"]["timeout-minutes"] > 90
    assert list_commands(jobs["package"])[1:] == [
        "python -m build --outdir dist infra/kernel",
        "python -m build",
        "twine check --strict dist/*",
    ]
