"""A repository of git from which Airflow reads pipelines, and its provider for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.git_commands import run_git
from tests.named_tests import ROOT
from tidegate.infra.minio_server import locate_cache_folder

PROVIDER = (
    "apache-airflow-providers-git==1.0.1"
    " --hash=sha256:78e6c8af70454e0d6120d33b4ebb922c42dd0e9ab78e81ffcbcf542b23664705"
)
SPEC = """\
apiVersion: tidegate/v1
name: counted
sources:
  one: {path: inbox, format: json, schema: {at: timestamp, n: long}, event_time: at, lag: 0s}
streams:
  totals: {schema: {total: long}}
reducers:
  sum: {from: events, to: totals, function: "rules.steps:add", initial: 0, inherit: true}
release: {mode: pass_through}
checkpoint: {idle_interval: 100ms}
spark: {driver_memory: 1g, jvm: quick}
supervision: {deploy: auto, retries: 20, retry_delay: 1s, sweep: "0 0 1 1 *"}
"""
ADD = "def add(state, event, index):\n    return state + STEP, [{'total': state + STEP}]\n"


def install_provider() -> Path:
    """The folder of Airflow's git provider, fetched once into the cache."""
    folder = locate_cache_folder() / "airflow-git" / PROVIDER.rpartition(":")[2][:12]
    if not (folder / "airflow/providers/git").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "requirements.txt").write_text(PROVIDER)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--require-hashes", "-r", str(folder / "requirements.txt")]
        subprocess.run([*command, "--target", str(folder)], check=True)
    return folder


class Team:
    """A checkout from which a team pushes, and the repository that Airflow reads."""

    def __init__(self, folder: Path) -> None:
        self.remote, self.checkout = folder / "remote.git", folder / "checkout"
        self.pipelines = self.checkout / "dags/pipelines"
        folder.mkdir()
        run_git(folder, "init", "--quiet", "--bare", "--initial-branch=main", str(self.remote))
        run_git(folder, "clone", "--quiet", str(self.remote), str(self.checkout))
        (self.pipelines / "rules").mkdir(parents=True)
        (self.pipelines / "counted.yaml").write_text(SPEC)
        code = (ROOT / "dags/tidegate_dags.py").read_text()
        (self.checkout / "dags/tidegate_dags.py").write_text(code)

    def push(self, step: int) -> str:
        """Let each row count for so much; the commit."""
        (self.pipelines / "rules/steps.py").write_text(f"STEP = {step}\n\n\n{ADD}")
        run_git(self.checkout, "add", ".")
        run_git(self.checkout, "commit", "--quiet", "-m", f"step {step}")
        run_git(self.checkout, "push", "--quiet", "origin", "HEAD:main")
        return run_git(self.checkout, "rev-parse", "HEAD")
