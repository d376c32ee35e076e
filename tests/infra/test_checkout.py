"""What a fresh checkout must be.

Five links that are folders, and a bootstrap that says plainly what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOOTSTRAP = ROOT / "infra" / "bootstrap.sh"

pytestmark = pytest.mark.skipif(
    not (ROOT / "src").exists(), reason="runs against the checkout, not against a wheel"
)


@pytest.mark.parametrize("package", ["checkpoints", "expectations", "infra", "jobs", "operators"])
def test_links_are_folders(package: str) -> None:
    """A checkout without symbolic links would turn them into text files, and every import would
    fail obscurely.
    """
    link = ROOT / "src" / "tidegate" / package
    assert link.is_symlink()
    assert link.resolve() == ROOT / package
    assert link.is_dir()


def _bare_path(folder: Path, *programs: str) -> dict[str, str]:
    """A PATH with these programs and nothing else."""
    for program in programs:
        found = shutil.which(program)
        assert found
        (folder / program).symlink_to(found)
    return {"PATH": str(folder), "HOME": str(folder)}


def _bootstrap(script: Path, task: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(script), task], env=env, capture_output=True, text=True, check=False
    )


def test_missing_java_is_one_line_with_the_command(tmp_path: Path) -> None:
    """No Java: exit code 2 and a single line that can be pasted into a shell."""
    (tmp_path / "apt-get").touch(mode=0o755)
    answer = _bootstrap(BOOTSTRAP, "java", _bare_path(tmp_path, "dirname", "sed", "head"))
    assert answer.returncode == 2
    assert answer.stderr.strip().splitlines() == [
        "tidegate: needs Java 17 for Spark; install it with: sudo apt-get install -y"
        " openjdk-17-jre-headless"
    ]


def test_wrong_java_is_named(tmp_path: Path) -> None:
    """Java 8 is found out before Spark fails with a stack trace."""
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    java.chmod(0o755)
    answer = _bootstrap(BOOTSTRAP, "java", _bare_path(tmp_path, "dirname", "sed", "head"))
    assert answer.returncode == 2
    assert "(found Java 8)" in answer.stderr


def test_missing_python_is_one_line(tmp_path: Path) -> None:
    """A python3 that only prints an error, as a shim does, counts as none; nothing is made."""
    tools = tmp_path / "tools"
    tools.mkdir()
    python = tools / "python3"
    python.write_text("#!/bin/sh\nexit 127\n")
    python.chmod(0o755)
    (tmp_path / "infra" / "kernel").mkdir(parents=True)
    script = shutil.copy(BOOTSTRAP, tmp_path / "infra")
    for name in (
        "requirements.lock",
        "pyproject.toml",
        "infra/kernel/pyproject.toml",
        "infra/installer.txt",
    ):
        (tmp_path / name).touch()
    answer = _bootstrap(Path(script), "venv", _bare_path(tools, "dirname", "cat", "cksum"))
    assert answer.returncode == 2
    assert len(answer.stderr.strip().splitlines()) == 1
    assert "needs Python 3.11, 3.12 or 3.13" in answer.stderr
    assert not os.path.exists(tmp_path / ".venv")
